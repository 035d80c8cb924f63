"""SLAMB: LAMB whose ranks exchange a share of the momentum a step (Xu et al., "SLAMB: Accelerated Large Batch Training with Sparse
Communication", ICML 2023). `LAMB` is here as well.

    optimizer = SLAMB(model.parameters(), lr=2e-3, compress_ratio=0.1)       # the model is NOT wrapped for data parallelism
    loss.backward()
    optimizer.step()                         # one collective of a tenth of the model, and one of all of it every 50 steps

Per rank, with g the local gradient, W ranks, k the compress ratio, M the units whose turn it is (a fixed random order, a share k
a step), together with all of every small tensor, and age the steps since a unit's last turn:
    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  m[M] <- mean of m[M] over the ranks
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w,  r = beta3^age
    trust = clamp(r |w[M]| / |u[M]| + (1 - r) |w[not M]| / |u[not M]|, 0.01, 1000) a tensor
    w <- w - lr (r + (1 - r) / sqrt(W)) trust u;  every `local_steps` steps w <- mean of w over the ranks
What a rank has not sent yet stays in its m: the mean of m over the ranks is the momentum of the mean gradient at any time.

As written (`compat`), second moments are never exchanged, so that early updates are up to a hundred times LAMB's, and k = 1 is not
LAMB. By default the gradients of small tensors are averaged instead of their momentum (as many bytes), the first `dense_steps`
and all steps at k = 1 average all gradients, and then every rank does what LAMB does.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from base import Base
from exchange import Exchange, average
from flat import Lay
from lamb import LAMB
from slamb_part import Part

__all__ = ["LAMB", "SLAMB"]

Plan = tuple[Part, Tensor | None, dict[Lay, Tensor]]


class SLAMB(Base):
    """LAMB with sparse communication; see above. It exchanges what is to be exchanged itself.

    Args:
        params: parameters or parameter groups of a model that is not wrapped for data parallelism.
        lr, betas, eps, weight_decay: as `LAMB`.
        compress_ratio: k, in (0, 1]; may change at any step.
        warmup: k of the first epochs, at least `compress_ratio`; for those who call `start_epoch`.
        beta3: how fast trust in a unit's momentum fades with its age.
        local_steps: between averagings of the weights.
        dense_steps: at the start, in which all gradients are averaged.
        selection: of what the order consists: 'block', rows of 64 elements, or 'random', elements.
        wire_dtype: of what is sent; the weights are sent in their own.
        process_group: the ranks; None is torch's default group. Without one nothing is sent and this is LAMB.
        node_group: this node's ranks, as many on every node: gradients are averaged within it; nodes take the place of ranks.
        compat: the authors' formulas.
        adapt: whether a group has trust ratios; None: its parameters with two axes or more, in `compat` all.

    Call it on all ranks alike. A gradient that is missing on a rank is zero there. A step that a GradScaler, or our engine, finds
    not finite on one rank (`found_inf`) changes nothing on any. The schedule of units is the host's: on a GPU, where the host
    does not wait to hear of it, a skipped step's units wait another round.

    State, each rank its own: `exp_avg`, `exp_avg_sq`, `fresh` (beta3^age; of each element, or of each row of 64) of a parameter,
    `steps`, `calls` and `cursor` of a group. `skipped` is () and 1 after a skipped step.

    Raises:
        ValueError: a hyper-parameter is out of its range.
        RuntimeError: the model is also wrapped in DistributedDataParallel.
    """

    communicates = True  # the engine leaves gradients alone and keeps a state a rank

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        compress_ratio: float = 0.1,
        beta3: float = 0.99,
        local_steps: int = 50,
        dense_steps: int = 10,
        selection: str = "block",
        wire_dtype: torch.dtype = torch.bfloat16,
        process_group: dist.ProcessGroup | None = None,
        node_group: dist.ProcessGroup | None = None,
        compat: bool = False,
        adapt: bool | None = None,
        warmup: Sequence[float] = (),
    ) -> None:
        if selection not in ("block", "random"):
            raise ValueError(f"SLAMB: selection={selection}, wanted block or random")
        if local_steps < 1 or dense_steps < 0:
            raise ValueError(f"SLAMB: local_steps={local_steps}, dense_steps={dense_steps}, wanted at least 1 and 0")
        self.local_steps, self.dense_steps, self.selection, self.compat = local_steps, dense_steps, selection, compat
        self.wire_dtype, self.warmup = wire_dtype, list(warmup)
        self.exchange = Exchange(process_group, node_group)
        self.parts: list[Part] | None = None
        self.skipped: Tensor | None = None
        names = ("lr", "betas", "eps", "weight_decay", "compress_ratio", "beta3", "adapt")
        super().__init__(params, dict(zip(names, (lr, betas, eps, weight_decay, compress_ratio, beta3, adapt))))
        self.ratios = [group["compress_ratio"] for group in self.param_groups]  # after the warm-up

    def ranges(self, group: dict[str, Any]) -> dict[str, bool]:
        """See Base."""
        return {
            "lr": group["lr"] >= 0,
            "betas": all(0 <= beta < 1 for beta in group["betas"]),
            "eps": group["eps"] >= 0,
            "weight_decay": group["weight_decay"] >= 0,
            "compress_ratio": 0 < group["compress_ratio"] <= 1,
            "beta3": 0 <= group["beta3"] <= 1,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.parts = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See Base."""
        super().load_state_dict(state_dict)
        self.parts = None

    def start_epoch(self, epoch: int) -> None:
        """Set every group's k for an epoch, counted from 0."""
        for group, ratio in zip(self.param_groups, self.ratios):
            group["compress_ratio"] = max(ratio, self.warmup[epoch]) if epoch < len(self.warmup) else ratio

    def take_bytes(self) -> int:
        """This rank's payload in all collectives since the last call."""
        return self.exchange.take_bytes()

    def build(self) -> list[Part]:
        """Lay everything out, at the first step and after a change of groups or state."""
        if self.exchange.size > 1:
            mine = {p for group in self.param_groups for p in group["params"]}
            for thing in gc.get_objects():
                if issubclass(type(thing), DistributedDataParallel) and not mine.isdisjoint(thing.parameters()):
                    raise RuntimeError(
                        "SLAMB exchanges momentum itself: do not wrap the model in DistributedDataParallel, which would average "
                        "the gradients first"
                    )
        for group in self.param_groups:
            if group["params"]:
                group.setdefault("steps", torch.zeros((), dtype=torch.float64, device=group["params"][0].device))
            group.setdefault("calls", 0)
        return [Part(group, self.state, self.selection, self.compat, seed) for seed, group in enumerate(self.param_groups)]

    def move(self) -> None:
        """See Base."""
        if self.parts is None:
            self.parts = self.build()
        for part in self.parts:
            part.load(getattr(self, "grad_scale", None))
        flag = self.share_in_node(self.parts)
        plans = [self.plan(part) for part in self.parts]
        live = self.swap(plans, flag)
        if live.device.type == "cpu" and not live:
            for part, units, _ in plans:
                part.give_back(units)
            return
        for part, units, received in plans:
            part.group["steps"] += live
            part.update(units, received, live, self.exchange.nodes)
        if self.exchange.size > 1 and self.parts[0].group["calls"] % self.local_steps == 0:
            self.average_weights()

    def share_in_node(self, parts: list[Part]) -> Tensor:
        """All gradients become this node's mean. Returns (1,) more than 0 where one of its ranks wants to skip the step."""
        buffers = [part.g[lay] for part in parts for lay in part.lays]
        found = getattr(self, "found_inf", None)
        flag = torch.zeros(1, device=buffers[0].device) if found is None else found.reshape(1).float()
        if self.exchange.local_size == 1:
            return flag
        flat = self.exchange.mean_in_node(torch.cat([flag, *(buffer.view(-1) for buffer in buffers)]))
        flag, *means = flat.split([1, *(buffer.numel() for buffer in buffers)])
        for buffer, mean in zip(buffers, means):
            buffer.copy_(mean.view_as(buffer))
        return flag

    def plan(self, part: Part) -> Plan:
        """What of a part is exchanged on this step: units of the large tensors (None: all of them), and values."""
        group = part.group
        group["calls"] += 1
        alone, beginning = self.exchange.size == 1, group["calls"] <= self.dense_steps
        dense = not self.compat and (alone or beginning or group["compress_ratio"] >= 1)
        units = None if dense or not part.large.rows else part.units(group["calls"])
        return part, units, part.values(units)

    def swap(self, plans: list[Plan], flag: Tensor) -> Tensor:
        """The step's one collective: values become their means over the ranks. Returns () whether the step is to be done."""
        pieces = [values for _, _, each in plans for values in each.values()]
        if self.exchange.size > 1:
            flat = self.exchange.mean_across(torch.cat([flag, *pieces]).to(self.wire_dtype)).to(pieces[0].dtype)
            flag, *means = flat.split([1, *(len(piece) for piece in pieces)])
            found = iter(means)
            for _, _, each in plans:
                for lay in each:
                    each[lay] = next(found)
        self.skipped = (flag[0] != 0).double()
        return 1 - self.skipped

    def average_weights(self) -> None:
        """Weights become their mean over the ranks; for a step's end, and in front of evaluation and saving."""
        average([p for group in self.param_groups for p in group["params"] if p.requires_grad], self.exchange)


def merge(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One state_dict of those of all ranks, for another number of ranks: each takes it, and mean moments stay as they were."""
    merged = {**states[0], "state": {number: dict(values) for number, values in states[0]["state"].items()}}
    for number, values in merged["state"].items():
        for name in values.keys() & {"exp_avg", "exp_avg_sq", "momentum_buffer"}:
            values[name] = torch.stack([state["state"][number][name] for state in states]).mean(0)
    return merged
