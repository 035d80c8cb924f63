"""SLAMB on several processes: torchrun --nproc-per-node 2 examples/slamb_torchrun.py

The model is not wrapped in DistributedDataParallel: SLAMB sends a tenth of its momentum itself.
"""

import os
import sys

import torch
import torch.distributed as dist
from faster_training import SLAMB
from torch import nn

if "LOCAL_RANK" not in os.environ:
    sys.exit(f"start it by torchrun --nproc-per-node 2 {sys.argv[0]}")
local_rank, on_node = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
has_gpus = torch.cuda.device_count() >= on_node  # a GPU for each process
dist.init_process_group("nccl" if has_gpus else "gloo")
device = torch.device("cuda", local_rank) if has_gpus else torch.device("cpu")
torch.manual_seed(0)  # the same weights on all ranks
model = nn.Sequential(nn.Linear(20, 512), nn.ReLU(), nn.Linear(512, 4)).to(device)
optimizer = SLAMB(model.parameters(), lr=0.01, compress_ratio=0.1)
torch.manual_seed(dist.get_rank())  # other samples on each
for step in range(1, 61):
    x = torch.randn(64, 20, device=device)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0 and dist.get_rank() == 0:
        kilobytes = optimizer.take_traffic().payload / 20 / 1000
        print(f"step {step}: loss {loss.item():.3f}, {kilobytes:.0f} kB sent a step", flush=True)
optimizer.average_weights()  # before an evaluation, or before weights are saved for later use
dist.barrier()  # gloo may abort where one process leaves while another is still sending
dist.destroy_process_group()
