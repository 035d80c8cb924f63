"""NGD, learned mixing and batches that grow, in a plain loop. Needs scikit-learn for its digits."""

import time

import torch
from faster_training import (
    NGD,
    DynamicBatchSampler,
    MetaMixup,
    Scheduled,
    at_milestones,
    mixup,
    ngd_groups,
)
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 8
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
train = TensorDataset(images[:1400], labels[:1400], torch.arange(1400))
held_out, held_out_labels = images[1400:1500], labels[1400:1500]  # for the mixing to learn from
test, test_labels = images[1500:], labels[1500:]

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(256, 10),
)  # fmt: skip
optimizer = NGD(ngd_groups(model, weight_decay=0.05), lr=0.05)
sampler = DynamicBatchSampler(len(train), 32, rule=Scheduled(32, at_milestones(2.0, [4, 6])))
meta = MetaMixup(rows=len(train))
for epoch in range(EPOCHS):
    start, losses = time.perf_counter(), []
    for step, (x, y, meta.rows) in enumerate(DataLoader(train, batch_sampler=sampler)):
        mix = meta.mix(y)
        logits = model(mixup.blend(x, mix))
        meta.observe(logits, y, mix)
        loss = sampler.loss_weight(step) * mixup.cross_entropy(logits, y, mix=mix)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    mean_loss = sum(losses) / len(losses)
    size = sampler.size
    sampler.end_epoch(mean_loss, time.perf_counter() - start)
    meta.row_losses.end_epoch()
    model.eval()
    with torch.no_grad():
        confidence, predicted = model(held_out).softmax(1).max(1)
        meta.learn(predicted, confidence, held_out_labels)
        accuracy = (model(test).argmax(1) == test_labels).float().mean().item()
    model.train()
    print(f"epoch {epoch + 1}: batch {size}, loss {mean_loss:.3f}, accuracy {accuracy:.1%}")
