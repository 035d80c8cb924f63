"""Fine-tuning an encoder of Hugging Face with NGD: python fine_tune_hf.py. Needs transformers.

With a network the encoder would be hf:distilbert-base-uncased. This one, in a folder, is tiny and
has random weights, so that it runs anywhere in seconds.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertModel

ROOT = Path(__file__).resolve().parents[1]


def save_encoder(folder):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=1000, intermediate_size=64, **sizes)).save_pretrained(folder)
    words = BertWordPieceTokenizer()
    words.train(str(ROOT / "input_pipeline" / "headlines.csv"), 1000, show_progress=False)
    words.save_model(str(folder))


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        save_encoder(f"{folder}/encoder")
        flags = f"--arch hf:{folder}/encoder --ngd --lr 0.05 --lr_schedule cosine --epochs 5"
        words = f"{ROOT}/transformer_test.py --dataset headlines --bs 16 --threads 1 {flags}"
        subprocess.check_call([sys.executable, *words.split(), "--out", f"{folder}/run"])
