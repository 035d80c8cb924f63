"""NGD for a model of timm, with timm's own loss and learning-rate schedule. Needs timm."""

import timm
import timm.loss
import timm.scheduler
import torch
from faster_training import NGD, ngd_groups

torch.manual_seed(0)
model = timm.create_model("resnet10t", num_classes=5)
optimizer = NGD(ngd_groups(model, weight_decay=0.05), lr=0.05)
schedule = timm.scheduler.CosineLRScheduler(optimizer, t_initial=10, warmup_t=2)
loss_fn = timm.loss.LabelSmoothingCrossEntropy(0.1)
x, y = torch.randn(32, 3, 64, 64), torch.randint(5, (32,))
for epoch in range(10):
    loss = loss_fn(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step(epoch + 1)
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
