"""Fine-tuning an encoder of Hugging Face with NGD: python fine_tune_hf.py. Needs transformers.

It stands in a folder, and would be hf:distilbert-base-uncased where there is a network. Here it is
tiny and has random weights, so that this runs anywhere in seconds.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertModel, BertTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
HEADLINES = ROOT / "input_pipeline" / "headlines.csv"


def save_encoder(folder):
    """Save a BERT of two layers, and a tokenizer learned on the headlines."""
    trained = BertWordPieceTokenizer()
    trained.train(str(HEADLINES), vocab_size=1000, show_progress=False)
    tokenizer = BertTokenizerFast(tokenizer_object=trained._tokenizer)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), intermediate_size=64, **sizes)
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        save_encoder(folder)
        flags = f"--dataset headlines --arch hf:{folder} --ngd --lr 0.05 --epochs 5 --bs 16"
        words = [*flags.split(), *"--threads 1 --out".split(), f"{folder}/run"]
        subprocess.run([sys.executable, str(ROOT / "transformer_test.py"), *words], check=True)
