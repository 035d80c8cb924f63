"""DeMo: ranks keep their own momentum and exchange only its few fastest components.

    optimizer = DeMo(model.parameters(), lr=1e-3)       # the model is NOT wrapped in DDP
    loss.backward()
    optimizer.step()                                    # one all-gather

Peng, Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization", arXiv:2411.19870, algorithm 1,
with the sign of their experiments. On each rank, with g its own gradient:
    m <- beta m + g
    c = discrete cosine transform of each chunk of m,  q = the k elements of c of largest size
    m <- m - inverse transform of q                     (what was not sent stays in m)
    s = mean of q over the ranks that sent an element, transformed back
    w <- w - lr (sign(s) + weight_decay w)
A weight is cut into chunks of at most 64 x 64 elements. One of four axes is a matrix (outputs,
everything else), and a vector has one row. The authors' code scales g by the learning rate, which
the sign undoes but while the rate changes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from distributed.averaging import RankAverager
from optimizers.base import CommunicatingOptimizer

LARGEST_CHUNK = 128  # elements a side: places within a chunk are sent in 16 bits


class DeMo(CommunicatingOptimizer):
    """DeMo (see above), which communicates by itself.

    All ranks must call it alike, and their weights stay equal. A gradient that is missing on some
    ranks is zero there; where all ranks miss it, the weight and its momentum stay as they are. A
    step that is non-finite on one rank (`found_inf`) changes nothing on any.

    State of a parameter, each rank its own:
        momentum_buffer     m, the shape of the parameter, in fp32 at least.

    Args:
        params: parameters or parameter groups of a model that is not wrapped for data parallelism.
        lr: by which each weight moves in a step.
        decay: beta.
        topk: k, elements of a chunk that are sent in a step, or all of a smaller chunk.
        chunk: the largest number of rows and of columns of a chunk; it has the largest ones that
            divide the matrix and are not above it.
        weight_decay: decoupled.
        wire_dtype: dtype in which elements are sent; their places take two bytes each, of which the
            sign says whether the gradient is missing.

    Raises:
        ValueError: a hyper-parameter is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        decay: float = 0.999,
        topk: int = 32,
        chunk: int = 64,
        weight_decay: float = 0.0,
        wire_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if not 1 <= chunk <= LARGEST_CHUNK:
            raise ValueError(f"DeMo: chunk={chunk} must be from 1 to {LARGEST_CHUNK}")
        self.chunk, self.wire_dtype = chunk, wire_dtype
        self.averager = RankAverager()
        self.parts: list[ChunkedTensors] | None = None
        self.trained: list[bool] = []  # which parameters are in them
        defaults = {"lr": lr, "decay": decay, "topk": topk, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in ("chunk", "wire_dtype", "averager")}
        return {**super().__getstate__(), **settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.parts, self.trained = None, []

    def check_hyperparameters(self, group: dict[str, Any]) -> dict[str, bool]:
        return {
            "lr": group["lr"] >= 0,
            "decay": 0 <= group["decay"] <= 1,
            "topk": group["topk"] >= 1,
            "weight_decay": group["weight_decay"] >= 0,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.parts = None

    def take_bytes(self) -> int:
        return self.averager.take_bytes()

    def _apply_step(self) -> None:
        trained = [p.requires_grad for group in self.param_groups for p in group["params"]]
        if self.parts is None or trained != self.trained:
            self.parts, self.trained = self._create_parts(), trained
        momenta = [self._next_momenta(part) for part in self.parts]
        own = [part.select(each, self.wire_dtype) for part, each in zip(self.parts, momenta)]
        if not own:  # all are frozen, on all ranks
            self.skipped = torch.zeros((), dtype=torch.float64)
            return
        received, skip = self._all_gather(own)
        self.skipped = skip.double()
        for number, (part, momentum) in enumerate(zip(self.parts, momenta)):
            residual = momentum - part.decode([own[number]])
            selections = [each[number] for each in received]
            signs = part.decode(selections).sign_()
            changes = [each & ~skip for each in part.has_gradient(selections)]
            part.update(residual, signs, changes=changes, state=self.state)

    def _create_parts(self) -> list[ChunkedTensors]:
        """Puts the parameters of each group together by the shape of their chunks."""
        parts: dict[tuple[int, tuple[int, int]], ChunkedTensors] = {}
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if not (p.requires_grad and p.numel()):
                    continue
                if "momentum_buffer" not in self.state[p]:
                    dtype = torch.promote_types(p.dtype, torch.float32)
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p, dtype=dtype)
                rows, columns = matrix_shape(p)
                shape = largest_divisor(rows, self.chunk), largest_divisor(columns, self.chunk)
                key = number, shape
                if key not in parts:
                    parts[key] = ChunkedTensors(group, shape, p.device)
                parts[key].tensors.append(p)
        return list(parts.values())

    def _next_momenta(self, part: ChunkedTensors) -> Tensor:
        """Returns beta m + g of a part's parameters, as chunks."""
        momenta = [self.state[p]["momentum_buffer"] for p in part.tensors]
        grads = [
            torch.zeros_like(m) if p.grad is None else p.grad.to(m.dtype)
            for p, m in zip(part.tensors, momenta)
        ]
        chunks = part.split(grads)
        if self.loss_scale is not None:
            chunks = chunks / self.loss_scale
        return chunks.add_(part.split(momenta), alpha=part.group["decay"])

    def _all_gather(
        self, own: list[tuple[Tensor, Tensor]]
    ) -> tuple[list[list[tuple[Tensor, Tensor]]], Tensor]:
        """Exchanges what the ranks have selected; the step's one collective.

        Returns:
            Of each rank, places and elements of each part, as `ChunkedTensors.select` returns them;
            and (), whether a rank asks to skip the step.
        """
        skip = torch.zeros((), dtype=torch.bool, device=own[0][0].device)
        if self.found_inf is not None:
            skip = self.found_inf.reshape(()) > 0
        pieces = [skip.to(torch.int16).reshape(1)]
        for places, elements in own:
            pieces += [places.to(torch.int16), elements]
        received = []
        for flag, *parts in self.averager.gather(pieces):
            skip = skip | (flag[0] != 0)
            received.append(
                [(places.long(), elements) for places, elements in zip(parts[::2], parts[1::2])]
            )
        return received, skip


class ChunkedTensors:
    """Parameters of one group whose chunks have the same shape.

    Args:
        group: the parameter group.
        shape: (rows, columns) of a chunk.
        device: of the parameters.

    Attributes:
        tensors: the parameters.
    """

    def __init__(self, group: dict[str, Any], shape: tuple[int, int], device: torch.device) -> None:
        self.group = group
        self.shape = shape
        self.tensors: list[Tensor] = []
        self.down = cosine_transform(shape[0]).to(device)
        self.across = cosine_transform(shape[1]).to(device)

    def split(self, tensors: list[Tensor]) -> Tensor:
        """Returns the chunks (chunks, rows, columns) of tensors with the parameters' shapes."""
        height, width = self.shape
        chunks = []
        for tensor in tensors:
            rows, columns = matrix_shape(tensor)
            grid = tensor.reshape(rows // height, height, columns // width, width)
            chunks.append(grid.transpose(1, 2).reshape(-1, height, width))
        return torch.cat(chunks)

    def join(self, chunks: Tensor) -> list[Tensor]:
        """Returns tensors with the parameters' shapes: the inverse of `split`."""
        height, width = self.shape
        tensors = []
        for tensor, own in zip(self.tensors, chunks.split(self.counts())):
            rows, columns = matrix_shape(tensor)
            grid = own.view(rows // height, columns // width, height, width)
            tensors.append(grid.transpose(1, 2).reshape(tensor.shape))
        return tensors

    def select(self, chunks: Tensor, wire_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the largest elements of each chunk's cosine transform.

        Args:
            chunks: (chunks, rows, columns).
            wire_dtype: dtype of the elements.
        Returns:
            places: (chunks, k) int64, in the flattened chunk; their complement, -1 - place, where
                the parameter has no gradient on this rank.
            elements: (chunks, k).
        """
        dtype = chunks.dtype
        transformed = (self.down.to(dtype) @ chunks @ self.across.T.to(dtype)).flatten(1)
        count = min(self.group["topk"], transformed.shape[1])
        places = transformed.abs().topk(count, dim=1, sorted=False).indices
        elements = transformed.gather(1, places).to(wire_dtype)
        for p, own in zip(self.tensors, places.split(self.counts())):
            if p.grad is None:
                own.bitwise_not_()
        return places, elements

    def counts(self) -> list[int]:
        """Returns the number of chunks of each parameter."""
        return [p.numel() // math.prod(self.shape) for p in self.tensors]

    def has_gradient(self, selections: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Returns for each parameter whether a rank has its gradient, bool ().

        Args:
            selections: of each rank, places and elements as `select` returns them.
        """
        of_chunks = torch.stack([places[:, 0] >= 0 for places, _ in selections]).any(0)
        return [own[0] for own in of_chunks.split(self.counts())]

    def decode(self, selections: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Returns the chunks of the mean of several ranks' selections.

        The mean of an element is that over the ranks that sent it, and 0 where none did. It is
        summed in the order of the ranks, so that all of them get the same bits.

        Args:
            selections: of each rank, places and elements as `select` returns them.
        Returns:
            (chunks, rows, columns) in the parameters' precision, fp32 at least.
        """
        places, _ = selections[0]
        dtype = torch.promote_types(self.tensors[0].dtype, torch.float32)
        height, width = self.shape
        total = torch.zeros(len(places), height * width, dtype=dtype, device=places.device)
        count = torch.zeros_like(total)
        for places, elements in selections:
            places = torch.where(places < 0, ~places, places)
            total.scatter_(1, places, total.gather(1, places) + elements)
            count.scatter_(1, places, count.gather(1, places) + 1)
        mean = (total / count.clamp_(min=1)).view(-1, height, width)
        return self.down.T.to(dtype) @ mean @ self.across.to(dtype)

    def update(
        self,
        momenta: Tensor,
        signs: Tensor,
        *,
        changes: list[Tensor],
        state: dict[Tensor, dict[str, Any]],
    ) -> None:
        """Takes the step.

        Args:
            momenta: the next momentum, as chunks.
            signs: of the mean of what was sent, as chunks.
            changes: of each parameter, bool (), false where it and its momentum stay as they are.
            state: of the optimizer.
        """
        lr, weight_decay = self.group["lr"], self.group["weight_decay"]
        each_joined = zip(self.tensors, self.join(momenta), self.join(signs), changes)
        for p, momentum, sign, change in each_joined:
            stored = state[p]["momentum_buffer"]
            stored.copy_(torch.where(change, momentum, stored))
            updated = p * (1 - lr * weight_decay) - lr * sign
            p.copy_(torch.where(change, updated, p))


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """Returns (outputs, everything else) of a tensor; a vector is one row."""
    if tensor.ndim < 2:
        return 1, tensor.numel()
    return len(tensor), tensor.numel() // len(tensor)


def largest_divisor(number: int, limit: int) -> int:
    """Returns the largest divisor of a number that is not above a limit."""
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def cosine_transform(length: int) -> Tensor:
    """Returns the orthonormal matrix (length, length) of the discrete cosine transform II, fp64."""
    places = torch.arange(length, dtype=torch.float64)
    matrix = torch.cos(math.pi / length * (places + 0.5) * places[:, None])
    matrix[0] *= math.sqrt(0.5)
    return matrix * math.sqrt(2 / length)
