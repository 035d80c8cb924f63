"""NGD in the Trainer of Hugging Face Transformers. Needs transformers and accelerate.

The Trainer's parameter groups do not say which layer is the classifier, so the optimizer is made
here. `optimizer_cls_and_kwargs=(NGD, {"lr": 0.02})` works as well; the classifier and the
embeddings are then under NGD like all other matrices.
"""

import tempfile

import torch
from faster_training import NGD, ngd_groups
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
config = BertConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=64, num_labels=2,
)  # fmt: skip
model = BertForSequenceClassification(config)
tokens = torch.randint(5, 50, (256, 12))
data = [{"input_ids": row, "labels": int(row[0] > 27)} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, num_train_epochs=6, per_device_train_batch_size=32, use_cpu=True, report_to=[],
        save_strategy="no", logging_steps=8, disable_tqdm=True, max_grad_norm=1.0,
    )  # fmt: skip
    optimizer = NGD(ngd_groups(model, weight_decay=0.01), lr=0.02)
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    print(f"training loss {trainer.train().training_loss:.3f}")
