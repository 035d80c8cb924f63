"""NGD: momentum whitened along its leading directions for matrices, AdamW for the rest.

    optimizer = NGD(ngd_groups(model, weight_decay=0.05), lr=0.08)   # optimizers.param_groups
    loss.backward()
    optimizer.step()

Each weight is a matrix, a convolution's one of (outputs, everything else). Its Nesterov momentum is
multiplied by F^(-1/2), where F is the momentum's second moment along the shorter side (of this one
momentum: no expectation, and so no Fisher matrix). F is known in the leading directions, which are
followed from step to step, and taken for a multiple of the identity in the others. Every step has
the same length, which depends on the weight's shape alone, unless nearly no momentum is left: a
weight with gradients of zeros, in place of None, goes on for some 65 steps at momentum 0.6, 320 at
0.9. The shape is meant for outputs first, unlike those of transposed convolutions and of GPT-2's
Conv1D.
Embeddings, classifiers, biases and normalisation take the step of AdamW. Of weights in shards
(FSDP's DTensors) one rank owns each matrix: it gathers X, and sends F^(-1/2) X back to the shards.

The symbols of the code, for one weight (everything in the code has a leading `batch` dimension, the
weights of one shape, which are updated together):

    symbol  shape         meaning
    X       (D, N)        the Nesterov momentum, D <= N; where the weight has more rows than
                          columns, its transpose
    F       (D, D)        = XX', of which this is known: R'SR + rho (I - R'R)
    R       (rank, D)     orthonormal rows, which span nearly the leading eigenvectors of F; all
                          that is kept between steps
    H       (rank, N)     = R X
    J       (rank, D)     = H X' = R F, whose rows span those of the next R: one step of subspace
                          iteration
    S       (rank, rank)  = H H' = R F R'
    rho     ()            = (|X|^2 - trace S) / (D - rank), the mean of F in other directions
    K       (rank, rank)  = I - (S / rho)^(-1/2), so that (F / rho)^(-1/2) X is X - R'K H

So the leading singular values of X become the root mean square of the others. In a step R is taken
two iterations on, the first of them with every fourth column of X, and then used: H and J twice, H
and R'K H with the last R, four thin matrix products and a quarter of two. That R has seen the
newest gradient matters: with the R of the step before, the leading directions of the newest
gradient would stay as they are. On a CPU, where D is at most twice the rank, F itself costs no
more: a product and a quarter of one for F, from which R, S and K follow, and one for F^(-1/2) X.

The form of F, a few directions and a multiple of the identity, followed online, is that of Povey,
Zhang and Khudanpur (arXiv:1410.7455), whose own optimizer is [KaldiNGD](optimizers/kaldi_ngd.py).
The exponent is that of Shampoo on one side (arXiv:1802.09568); with all D directions the step would
be that of Muon (Jordan, 2024), and following the leading ones by a product with the last is done in
PowerSGD (arXiv:1905.13727) and Dion (arXiv:2504.05295). docs/natural_gradient.md compares them.
tests/oracles/ngd_oracle.py is the method for one matrix in plain float64, to read first.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from optimizers.adam import AdamStep, adamw_step_
from optimizers.base import GradScalerOptimizer
from optimizers.low_rank import project, row_norms, second_moment, subtract_projection
from optimizers.matrix_functions import inverse_square_root, traces
from optimizers.param_groups import is_matrix
from optimizers.shards import (
    balanced_owners,
    local,
    owned_like,
    ranks_of_shards,
    shard_sizes,
    sharded_like,
    whole,
)

CPU_BATCH_BYTES = 16 * 2**20  # of weights that are updated together: what a cache holds
GPU_BATCH_BYTES = 2**28  # ... on other devices: few kernel launches
ALONE_DEVICES = {"cpu"}  # on which a large batch takes its step alone, in the cache
TOGETHER_BYTES = 2**20  # of a batch up to which it takes its step with others all the same
# Relative to |X|^2: the least second moment of a direction. fp32 knows of nothing below it.
FLOOR = 1e-7
# Relative to |X|: how much of the old R is in the new one, for directions in which X is nothing.
KEPT = 1e-5
SMALLEST = 3e-14  # norm of F^(-1/2) X whose step has the full length; |X| is up to 3,000 times it
SAMPLE = 4  # the first of two iterations takes every fourth column of X
RIDGE = 1e-10  # relative to the trace of H H', added to its diagonal
# F of small weights is computed in fp32 where R sees at least this share of its trace, and fp32's
# rounding is lifted by a ridge, relative to that trace.
SEEN = 0.1
RIDGE_OF_FP32 = 1e-6


class NGD(GradScalerOptimizer):
    """Momentum whitened along its leading directions for matrices; AdamW for the rest.

    A parameter without a gradient does not change. All hyper-parameters but `ngd` may change at any
    step; with a new rank the directions begin anew. Rounding removes most small steps of bf16
    weights: keep weights in fp32, and compute in bf16 by autocast.

    State of a matrix:
        momentum_buffer        its shape, in fp32 at least: the mean of the gradients.
        directions             (rank, D), R; of a matrix in shards, the owner's.
    State of another parameter:
        exp_avg, exp_avg_sq    as of AdamW, in fp32 at least.
        step                   fp32 (), how many gradients it had, without those of skipped steps.

    Args:
        params: parameters or parameter groups. A group with `ngd=False` is under AdamW, as are
            parameters without two axes longer than 1. `optimizers.param_groups.ngd_groups` makes
            the groups of a model; embeddings and the classifier belong under AdamW.
        lr: learning rate of the matrices. A step has the Frobenius norm lr sqrt(min(m, n))
            sqrt(max(1, m / n)) for m outputs and n inputs, as Muon's has where the momentum has
            full rank; where it has less, in small batches, Muon's is shorter.
        momentum: decay rate of the mean of the gradients, which is taken before F^(-1/2). torch's
            OneCycleLR and CyclicLR would change `betas` alone: give them cycle_momentum=False.
        nesterov: use the mean that the next step would have if its gradient were the same.
        weight_decay: decoupled (arXiv:1711.05101): weights shrink by lr * weight_decay, those
            under AdamW by AdamW's learning rate * weight_decay.
        rank: directions of a matrix whose second moments are told apart, at most half of its
            shorter side, rounded up.
        adamw_ratio: the learning rate of AdamW is lr * adamw_ratio.
        betas, eps: of AdamW.
        ngd: whether this group's matrices are under NGD.

    Raises:
        ValueError: a hyper-parameter is out of its range.
    """

    own_ranges = {"adamw_ratio": lambda ratio: ratio >= 0}

    def __init__(
        self,
        params: Any,
        lr: float = 0.08,
        *,
        momentum: float = 0.6,
        nesterov: bool = True,
        weight_decay: float = 0.05,
        rank: int = 32,
        adamw_ratio: float = 0.075,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        ngd: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "rank": rank,
            "adamw_ratio": adamw_ratio,
            "betas": betas,
            "eps": eps,
            "ngd": ngd,
        }
        super().__init__(params, defaults)

    def _apply_step(self) -> None:
        self.remake(self._made_of, self._make_batches)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            for batches in self.batches:
                active = self._load_momenta(batches)
                whiten(batches, active=active)
                self._update(batches, active=active)
            for sharded in self.sharded:
                self._sharded_step(sharded)
            for group in self.param_groups:
                self._adamw_step(group)

    def _made_of(self) -> list[Any]:
        has_gradient = [p.grad is not None for group in self.param_groups for p in group["params"]]
        ranks = [group["rank"] for group in self.param_groups]
        return [*self.held("momentum_buffer", "directions"), *has_gradient, *ranks]

    def _make_batches(self) -> None:
        """Makes the batches; those of whole matrices get memory to work in."""
        self.batches, self.sharded = [], []
        by_kind: dict[Any, list[tuple[int, Tensor]]] = defaultdict(list)
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is not None and is_matrix(p, group):
                    dtype = torch.promote_types(p.dtype, torch.float32)
                    by_kind[ranks_of_shards(p), dtype].append((number, p))
        for (ranks, _), matrices in by_kind.items():
            # the products that take most of the time cost as much for each element of a matrix
            size = 1 if ranks is None else ranks.size()
            owners = balanced_owners([p.numel() for _, p in matrices], size)
            batches = self._cut(matrices, owners)
            if ranks is None:
                self.batches += step_together(batches)
            else:
                self.sharded.append(ShardedMatrices(batches, ranks))
        scratch: dict[Any, Tensor] = {}  # which one list after another uses
        for batches in self.batches:
            first, size = batches[0], sum(batch.elements for batch in batches)
            key = first.device, first.dtype
            if key not in scratch or scratch[key].shape[1] < size:
                scratch[key] = torch.empty((2, size), device=first.device, dtype=first.dtype)
        for batches in self.batches:
            rest = scratch[batches[0].device, batches[0].dtype]
            for batch in batches:
                X, batch.buffer = rest[:, : batch.elements]
                batch.X = X.view(len(batch.parameters), -1)
                rest = rest[:, batch.elements :]

    def _cut(
        self, matrices: Sequence[tuple[int, Tensor]], owners: Sequence[int]
    ) -> list[MatrixBatch]:
        """Cuts (number of a group, matrix) into batches of one group, shape, device and owner."""
        by_kind: dict[Any, list[Tensor]] = defaultdict(list)
        for (group, p), owner in zip(matrices, owners):
            by_kind[group, owner, p.shape, p.dtype, p.device].append(p)
        batches = []
        for (group, owner, *_), alike in by_kind.items():
            limit = CPU_BATCH_BYTES if alike[0].device.type == "cpu" else GPU_BATCH_BYTES
            size = max(1, limit // (alike[0].numel() * alike[0].element_size()))
            for start in range(0, len(alike), size):
                parameters = alike[start : start + size]
                states, rank = [self.state[p] for p in parameters], self.param_groups[group]["rank"]
                batches.append(MatrixBatch(parameters, states, group=group, rank=rank, owner=owner))
        return batches

    def _load_momenta(self, batches: Sequence[MatrixBatch]) -> Tensor:
        """X of batches becomes the momentum; returns 0 () where the step is skipped, else 1."""
        first = batches[0]
        active = torch.ones((), dtype=first.dtype, device=first.device)
        if self.found_inf is not None:
            active = (self.found_inf == 0).to(first.device, first.dtype)
        for batch in batches:
            batch.load_momentum(
                self.param_groups[batch.group],
                active=active,
                loss_scale=self.loss_scale,
                found_inf=self.found_inf,
            )
        return active

    def _update(self, batches: Sequence[MatrixBatch], *, active: Tensor) -> None:
        for batch in batches:
            batch.update(self.param_groups[batch.group], active=active)

    def _sharded_step(self, sharded: ShardedMatrices) -> None:
        """Takes the step with matrices in shards, of which each rank whitens its own."""
        first, ranks = sharded.batches[0], sharded.ranks
        flat = torch.empty(sum(sharded.sent), dtype=first.dtype, device=first.device)
        shards = dict(zip(sharded.batches, sharded.shards(flat)))
        for batch in sharded.batches:
            batch.X = shards[batch]
        active = self._load_momenta(sharded.batches)
        gathered = flat.new_empty(sum(sharded.received))
        dist.all_to_all_single(gathered, flat, sharded.received, sharded.sent, group=ranks)
        pieces = dict(zip(sharded.owned, sharded.pieces(gathered)))
        for batches in sharded.together:
            for batch in batches:
                batch.X = torch.cat(pieces[batch], dim=1)
                batch.buffer = torch.empty_like(batch.X).flatten()
            whiten(batches, active=active)
            for batch in batches:
                parts = batch.X.split([piece.shape[1] for piece in pieces[batch]], dim=1)
                torch._foreach_copy_(pieces[batch], list(parts))
                batch.X = shards[batch]
                del batch.buffer
        dist.all_to_all_single(flat, gathered, sharded.sent, sharded.received, group=ranks)
        self._update(sharded.batches, active=active)
        for batch in sharded.batches:  # the memory is free until the next step
            del batch.X

    def _adamw_step(self, group: dict[str, Any]) -> None:
        """Takes AdamW's step with the parameters of a group that are no matrices."""
        others = [p for p in group["params"] if not is_matrix(p, group)]
        for device in dict.fromkeys(p.device for p in others):
            on_device = {**group, "params": [p for p in others if p.device == device]}
            parameters, grads, active = self.unscaled_grads(on_device)
            if not parameters:
                continue
            for p in parameters:
                if "step" not in self.state[p]:
                    self.state[p]["step"] = torch.zeros((), device=device)
            m, v = self.moments(parameters, grads, "exp_avg", "exp_avg_sq")
            steps = [self.state[p]["step"] for p in parameters]
            torch._foreach_add_(steps, 1.0 if active is None else [active.float()] * len(steps))
            adam = AdamStep.of(group, torch.stack(steps), active=active)
            lr = group["lr"] * group["adamw_ratio"]
            weights = [local(p) for p in parameters]
            adamw_step_(weights, m, v, grads=grads, adam=adam, lr=lr)


def step_together(batches: Sequence[MatrixBatch]) -> list[list[MatrixBatch]]:
    """Returns the batches in lists that take their steps together.

    On a CPU, where the gradients of one batch fit its cache, each is alone; on other devices a list
    has all that have the same rank, so that the algebra of small matrices is launched once.
    """
    together: dict[Any, list[MatrixBatch]] = defaultdict(list)
    for batch in batches:
        is_alone = batch.device.type in ALONE_DEVICES and batch.bytes > TOGETHER_BYTES
        alone = len(together) if is_alone else None
        kind = batch.group, batch.device, batch.dtype, batch.rank, batch.is_small, alone
        together[kind].append(batch)
    return list(together.values())


class ShardedMatrices:
    """The batches of matrices in shards, each with an owner, and how they travel.

    Args:
        batches: of the same ranks and dtype.
        ranks: those that hold the shards.

    Attributes:
        batches: alike on all ranks, in the order of their owners.
        owned: those of this rank.
        together: the owned ones in lists that take their steps together.
        sent, received: elements to, and from, each rank on the way to the owners.
    """

    def __init__(self, batches: Sequence[MatrixBatch], ranks: dist.ProcessGroup) -> None:
        self.ranks, self.rank, size = ranks, ranks.rank(), ranks.size()
        self.batches = sorted(batches, key=lambda batch: batch.owner)
        self.owned = [batch for batch in self.batches if batch.owner == self.rank]
        self.together = step_together(self.owned)
        self.parts = {batch: shard_sizes(batch.parameters[0], size) for batch in self.batches}
        self.sent, self.received = [0] * size, [0] * size
        for batch in self.batches:
            self.sent[batch.owner] += len(batch.parameters) * self.parts[batch][self.rank]
        for batch, other in itertools.product(self.owned, range(size)):
            self.received[other] += len(batch.parameters) * self.parts[batch][other]

    def shards(self, flat: Tensor) -> list[Tensor]:
        """Views of what is sent (elements,): this rank's (matrices, part) of each batch."""
        return self._views(flat, [(batch, self.rank) for batch in self.batches])

    def pieces(self, flat: Tensor) -> list[list[Tensor]]:
        """Views of what is received: for each owned batch the (matrices, part) of each rank."""
        order = [(batch, rank) for rank in range(len(self.sent)) for batch in self.owned]
        views = self._views(flat, order)
        return [views[place :: len(self.owned)] for place in range(len(self.owned))]

    def _views(self, flat: Tensor, order: Sequence[tuple[MatrixBatch, int]]) -> list[Tensor]:
        shapes = [(len(batch.parameters), self.parts[batch][rank]) for batch, rank in order]
        parts = flat.split([count * part for count, part in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes)]


class MatrixBatch:
    """Matrices of one shape, dtype and device that are updated together, one row of `X` each.

    Args:
        parameters: the parameters.
        states: the optimizer's state of each. What is missing is created, and the tensors become
            views of this batch's tensors.
        group: the number of the parameters' group.
        rank: the most directions that are told apart.
        owner: the rank that whitens them, of those that hold their shards.
    """

    X: Tensor  # (batch, elements of a parameter, or of its shard): gradient, momentum, step
    buffer: Tensor  # as much memory again

    def __init__(
        self,
        parameters: list[Tensor],
        states: list[dict[str, Any]],
        *,
        group: int,
        rank: int,
        owner: int,
    ) -> None:
        self.parameters, self.group, self.owner = parameters, group, owner
        first = parameters[0]
        ranks = ranks_of_shards(first)
        is_owner = ranks is None or owner == ranks.rank()
        self.device = first.device
        self.dtype = torch.promote_types(first.dtype, torch.float32)  # of all but the parameters
        self.elements = len(parameters) * first.numel()
        self.bytes = self.elements * self.dtype.itemsize
        # a convolution as (outputs, kernel, inputs), as channels_last has it in memory
        self.axis_order = [0, *range(2, first.ndim), 1]
        self.inverse_order = sorted(range(first.ndim), key=self.axis_order.__getitem__)
        rows, columns = len(first), first.numel() // len(first)
        self.dim = min(rows, columns)
        self.length = math.sqrt(self.dim * max(1, rows / columns))  # of a step at lr 1
        if rows <= columns:
            self.view_shape = (len(parameters), 1, rows, columns)
        else:
            self.view_shape = (len(parameters), rows, columns, 1)
        self.rank = rank = min((self.dim + 1) // 2, rank)
        self.dims = torch.full(
            (len(parameters),), float(self.dim), dtype=torch.float64, device=self.device
        )
        if missing := [state for state in states if len(state.get("directions", ())) != rank]:
            directions = initial_directions(rank, self.dim).to(self.device, self.dtype)
            momentum = torch.zeros_like(local(first), dtype=self.dtype)
            for state in missing:
                state["directions"] = directions
                state.setdefault("momentum_buffer", momentum)
        R = torch.stack([whole(state["directions"]) for state in states])
        self.R = R.to(self.dtype)  # (batch, rank, D); of another precision after a load
        self.is_small = self.device.type in ALONE_DEVICES and self.dim <= 2 * rank
        buffers = [local(state["momentum_buffer"]).permute(self.axis_order) for state in states]
        self.momentum = torch.stack(buffers).to(self.dtype)  # (batch, a weight's permuted shape)
        for p, state, buffer, row in zip(parameters, states, self.momentum, self.R):
            state["momentum_buffer"] = sharded_like(buffer.permute(self.inverse_order), p)
            state["directions"] = owned_like(row, p, is_owner=is_owner)
        if not is_owner:
            del self.R

    @property
    def matrices(self) -> Tensor:
        """X as (batch, 1, D, N), or as (batch, N, D, 1) where a matrix has more rows."""
        return self.X.view(self.view_shape)

    def load_momentum(
        self,
        group: dict[str, Any],
        *,
        active: Tensor,
        loss_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Takes the gradients into the momentum, and X is the (Nesterov) momentum.

        Args:
            group: the hyper-parameters of this step.
            active: 0 where the step is skipped, else 1 ().
            loss_scale: the factor by which the gradients are too large (); None is 1.
            found_inf: other than 0 where the step must be skipped (); None is 0.
        """
        X, momentum = self.X, self.momentum.view(self.X.shape)
        grads = [local(p.grad).permute(self.axis_order) for p in self.parameters]
        torch.stack(grads, out=X.view(self.momentum.shape))
        if loss_scale is not None:
            X /= loss_scale.to(X.device)
        if found_inf is not None:
            torch.nan_to_num_(X, 0.0, 0.0, 0.0)
        momentum.lerp_(X, active * (1 - group["momentum"]))
        if group["nesterov"]:
            X.lerp_(momentum, group["momentum"])
        else:
            X.copy_(momentum)

    def moment(self, dtype: torch.dtype, *, is_sampled: bool) -> Tensor:
        """Computes X X' (batch, D, D) in a dtype, of all columns of X or of some."""
        X = sample(self.matrices, rank=self.R.shape[1]) if is_sampled else self.matrices
        X = X.to(dtype)
        return second_moment(X.flatten(0, 1) if X.shape[3] > 1 else X[..., 0], X)

    def multiply(self, W: Tensor) -> None:
        """X becomes W X, for symmetric W (batch, D, D)."""
        product = project(W, self.matrices, buffer=self.buffer)
        self.X, self.buffer = product.view(self.X.shape), self.X.flatten()

    def normalize(self) -> None:
        """Scales X to the length of a step at a learning rate of 1."""
        X = self.X
        X.mul_((self.length / row_norms(X).clamp(min=SMALLEST)).to(X.dtype)[:, None])

    def update(self, group: dict[str, Any], *, active: Tensor) -> None:
        X, weights = self.X, [local(p) for p in self.parameters]
        if decay := group["weight_decay"]:
            torch._foreach_add_(self._as_parameters(X), weights, alpha=decay)
        X.mul_(active * -group["lr"])
        torch._foreach_add_(weights, self._as_parameters(X))

    def _as_parameters(self, X: Tensor) -> list[Tensor]:
        """Returns the rows of X (batch, elements) in the shape of the parameters."""
        permuted = X.view(self.momentum.shape).permute(0, *(1 + a for a in self.inverse_order))
        return list(permuted.unbind())


def whiten(batches: Sequence[MatrixBatch], *, active: Tensor) -> None:
    """X of batches that step together, the momentum, becomes the step at a learning rate of 1."""
    (precondition_small if batches[0].is_small else precondition)(batches, active=active)
    for batch in batches:
        batch.normalize()


def precondition(batches: Sequence[MatrixBatch], *, active: Tensor) -> None:
    """Takes R of the batches on, and multiplies their X by F^(-1/2) in place.

    The algebra of small matrices is one computation for all batches, of X / |X| instead of X.
    """
    counts = [len(batch.X) for batch in batches]
    norm = torch.cat([row_norms(batch.X) for batch in batches])[:, None, None]
    scales = torch.where(norm > 0, 1 / norm, 0).to(batches[0].dtype).split(counts)
    directions = [batch.R for batch in batches]
    for is_sampled in (True, False):
        grams, products = [], []
        for batch, R, scale in zip(batches, directions, scales):
            X = sample(batch.matrices, rank=R.shape[1]) if is_sampled else batch.matrices
            H = project(R * scale, X, buffer=batch.buffer)
            grams.append(gram(H, X))
            products.append(second_moment(H, X) * scale)
        old = pad_and_cat(directions)
        G, J = torch.cat(grams), pad_and_cat(products).double()
        ridge = RIDGE * traces(G)
        stacked = next_directions(G, J, R=old.double(), ridge=ridge).to(old.dtype)
        if is_sampled:  # all sampled columns may be 0
            is_valid = stacked.isfinite().flatten(1).all(1)
            stacked = torch.where(is_valid[:, None, None], stacked, old)
        directions = [
            R[:, :, : batch.dim].contiguous() for R, batch in zip(stacked.split(counts), batches)
        ]
    is_valid = stacked.isfinite().flatten(1).all(1) & (active > 0)
    for batch, R, valid in zip(batches, directions, is_valid.split(counts)):
        batch.R.copy_(torch.where(valid[:, None, None], R, batch.R))
    projected = [
        project(batch.R * scale, batch.matrices, buffer=batch.buffer)
        for batch, scale in zip(batches, scales)
    ]
    S = torch.cat([gram(H, batch.matrices) for H, batch in zip(projected, batches)])
    K = whitening_correction(S, dim=torch.cat([batch.dims for batch in batches])) * norm
    K = torch.where(K.isfinite().flatten(1).all(1)[:, None, None], K, 0).to(stacked.dtype)
    for batch, H, part in zip(batches, projected, K.split(counts)):
        subtract_projection(batch.matrices, H, W=part @ batch.R)


def precondition_small(batches: Sequence[MatrixBatch], *, active: Tensor) -> None:
    """As `precondition`, from F itself, which costs less than H and J where D <= 2 rank.

    The host reads whether fp32 will do for F: it is that of a CPU.
    """
    counts = [len(batch.X) for batch in batches]
    square = torch.cat([row_norms(batch.X) for batch in batches]).square()[:, None, None]
    R = old = pad_and_cat([batch.R for batch in batches]).double()
    for is_sampled in (True, False):
        for dtype in (batches[0].dtype, torch.float64):
            moments = [batch.moment(dtype, is_sampled=is_sampled) for batch in batches]
            F = pad_and_cat(moments, square=True).double() / square
            J = R @ F
            G = J @ R.mT
            seen, total = traces(G), traces(F)
            if dtype == torch.float64 or not (seen < SEEN * total).any():
                break
        ridge = RIDGE * seen if dtype == torch.float64 else RIDGE_OF_FP32 * total
        next_R = next_directions(G, J, R=R, ridge=ridge)
        is_valid = next_R.isfinite().flatten(1).all(1)  # all sampled columns may be 0
        R = torch.where(is_valid[:, None, None], next_R, R)
    K = whitening_correction(R @ F @ R.mT, dim=torch.cat([batch.dims for batch in batches]))
    K = torch.where(K.isfinite().flatten(1).all(1)[:, None, None], K, 0)
    W = torch.eye(R.shape[2], dtype=R.dtype, device=R.device) - R.mT @ K @ R
    W, R = W.to(batches[0].dtype), torch.where(active > 0, R, old)
    for batch, R_of, W_of in zip(batches, R.split(counts), W.split(counts)):
        batch.R.copy_(R_of[:, :, : batch.dim])
        batch.multiply(W_of[:, : batch.dim, : batch.dim])


def pad_and_cat(tensors: Sequence[Tensor], *, square: bool = False) -> Tensor:
    """Joins tensors (batch, rank, D), or (batch, D, D), the shorter ones filled up with zeros."""
    missing = [max(tensor.shape[2] for tensor in tensors) - tensor.shape[2] for tensor in tensors]
    padding = [(0, count, 0, count if square else 0) for count in missing]
    return torch.cat([functional.pad(tensor, pad) for tensor, pad in zip(tensors, padding)])


def initial_directions(rank: int, dim: int) -> Tensor:
    """Returns R_0 (rank, dim), orthonormal rows that any X has a component along, float64.

    They are e_i + e_(i + rank) + e_(i + 2 rank) + ..., scaled.
    """
    rows = torch.eye(rank, dtype=torch.float64).repeat(1, -(-dim // rank))[:, :dim]
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)


def sample(X: Tensor, *, rank: int) -> Tensor:
    """Returns some columns of X (batch, left, D, right), every fourth where there are enough."""
    columns = X.shape[1] * X.shape[3]
    step = max(1, min(SAMPLE, columns // (2 * rank)))
    return X[:, ::step] if X.shape[3] == 1 else X[:, :, :, ::step].contiguous()


def gram(H: Tensor, X: Tensor) -> Tensor:
    """Computes H H' (batch, rank, rank), float64, of H from `project` of X."""
    H = H.double()
    return H.mT @ H if X.shape[3] == 1 else H @ H.mT


def next_directions(G: Tensor, J: Tensor, *, R: Tensor, ridge: Tensor) -> Tensor:
    """Computes the next R: orthonormal rows (batch, rank, D), float64, that span those of R F.

    Args:
        G: H H' (batch, rank, rank) with H = R X and |X| = 1.
        J: H X' (batch, rank, D), = R F.
        R: (batch, rank, D).
        ridge: (batch,), added to the diagonal of G.

    Returns:
        R, not finite where X is 0 or not finite.
    """
    eye = torch.eye(G.shape[1], dtype=G.dtype, device=G.device)
    C, _ = torch.linalg.cholesky_ex(G + ridge[:, None, None] * eye)
    Y = torch.linalg.solve_triangular(C, J, upper=False)  # rows of J differ in length far more
    Y = Y + KEPT * R
    L, _ = torch.linalg.cholesky_ex(Y @ Y.mT)
    return torch.linalg.solve_triangular(L, Y, upper=False)


def whitening_correction(S: Tensor, *, dim: Tensor) -> Tensor:
    """Computes K = I - (S / rho)^(-1/2), float64.

    Args:
        S: (batch, rank, rank), F between the rows of R, where the trace of F is 1.
        dim: D (batch,), float64.

    Returns:
        K (batch, rank, rank), not finite where S is not.
    """
    rank = S.shape[1]
    eye = torch.eye(rank, dtype=S.dtype, device=S.device)
    rest = 1 - traces(S)
    rho = (rest / (dim - rank).clamp(min=1)).clamp(min=FLOOR)
    root = inverse_square_root(S + FLOOR * eye)
    return eye - rho.sqrt()[:, None, None] * root
