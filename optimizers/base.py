"""Base classes of our optimizers, and the small operations on lists of tensors that they share.

A subclass of GradScalerOptimizer implements `_apply_step`, as optimizers/lars.py does.
"""

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from optimizers.shards import local, sharded_like

RANGES: dict[str, Callable[[Any], bool]] = {
    "lr": lambda lr: lr >= 0,
    "momentum": lambda momentum: 0 <= momentum < 1,
    "betas": lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
    "eps": lambda eps: eps >= 0,
    "weight_decay": lambda decay: decay >= 0,
    "rank": lambda rank: isinstance(rank, Integral) and int(rank) >= 1,
}
"""Whether a value is in the range of a hyper-parameter that several optimizers have."""


class CheckedOptimizer(torch.optim.Optimizer):
    """An optimizer that checks its hyper-parameters; subclasses implement `_apply_step`.

    Raises:
        ValueError: a hyper-parameter of a group is out of its range, a group is complex or on
            several devices, or a gradient is sparse.
    """

    own_ranges: dict[str, Callable[[Any], bool]] = {}  # as `RANGES`, of its own hyper-parameters
    needs_one_device = False  # whether all parameters of a group must lie on one
    made_of: Sequence[Any] = (None,)  # see `remake`

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.made_of = (None,)

    @abstractmethod
    def _apply_step(self) -> None:
        """Updates all parameters; called without gradient tracking."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = self.defaults | param_group
        if group.get("maximize"):
            raise ValueError(f"{type(self).__name__}: maximize is not there; negate the loss")
        for setting, is_in_range in (RANGES | self.own_ranges).items():
            with contextlib.suppress(TypeError):  # of a value that is no number
                if setting not in group or is_in_range(group[setting]):
                    continue
            name = type(self).__name__
            raise ValueError(f"{name}: {setting}={group[setting]!r} is out of its range")
        super().add_param_group(param_group)
        parameters = self.param_groups[-1]["params"]
        devices = {parameter.device for parameter in parameters}
        several = self.needs_one_device and len(devices) > 1
        if several or any(parameter.is_complex() for parameter in parameters):
            del self.param_groups[-1]
            what = "on several devices; give one for each" if several else "with complex numbers"
            raise ValueError(f"{type(self).__name__}: a group {what}")

    def remake(self, made_of: Callable[[], Sequence[Any]], make: Callable[[], None]) -> None:
        """Calls `make` where the objects or whole numbers are others than after the last call.

        Users may put other parameters into groups, and other tensors into states.
        """
        now = made_of()
        same = [a is b or (isinstance(a, int) and a == b) for a, b in zip(now, self.made_of)]
        if len(now) != len(self.made_of) or not all(same):
            make()
            self.made_of = made_of()  # the states may be views of what was made by now

    def held(self, *names: str) -> list[Any]:
        """All parameters, their number in each group, then their states of these names, or None."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        sizes = [len(group["params"]) for group in self.param_groups]
        states = [self.state.get(p, {}) for p in parameters]
        return [*parameters, *sizes, *(state.get(name) for name in names for state in states)]

    @torch._disable_dynamo  # torch's compiler would trace what `remake` keeps
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step.

        Args:
            closure: computes the loss and its gradients anew; its loss is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._apply_step()
        except RuntimeError as error:
            grads = (p.grad for group in self.param_groups for p in group["params"])
            if any(grad is not None and grad.is_sparse for grad in grads):
                name = type(self).__name__
                raise ValueError(f"{name} takes no sparse gradients: sparse=False") from error
            raise
        return loss


class GradScalerOptimizer(CheckedOptimizer):
    """An optimizer that skips a step with non-finite gradients on the device, without a host read.

    A GradScaler (and `step_unless_skipped`) sets `found_inf` and `grad_scale` instead of reading
    them on the host, as it does for torch's fused optimizers. Where `_step_supports_amp_scaling` is
    set to False on an optimizer, a GradScaler unscales its gradients and reads on the host whether
    to call `step`, as of any plain one.
    """

    # torch's GradScaler reads the first; it sets the others before `step` and deletes them after it
    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None  # (), greater than 0 where the step must be skipped
    grad_scale: Tensor | float | None = 1.0  # (); a GradScaler multiplies this default by its scale

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step, see `CheckedOptimizer.step`."""
        if isinstance(self.found_inf, int):  # a GradScaler has found no gradient
            self.found_inf = None
        return super().step(closure)

    @property
    def loss_scale(self) -> Tensor | None:
        """The factor () by which the gradients are too large; None if they are not scaled."""
        return self.grad_scale if isinstance(self.grad_scale, Tensor) else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as torch does, but each state tensor keeps its own precision.

        torch would cast the states of floating-point parameters to the parameters' dtype.
        """
        loaded: dict[str, Any] = {}  # what the user's hooks before loading make of it
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, given: loaded.update(given)),
            self.register_load_state_dict_post_hook(
                lambda _: self._restore_precision(loaded), prepend=True
            ),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _restore_precision(self, loaded: dict[str, Any]) -> None:
        """Replaces state tensors by those of a state_dict, in their own precision."""
        numbers = [number for group in loaded["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters):
            for name, value in loaded["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device)
        for group in self.param_groups:
            for name, value in group.items():
                if isinstance(value, Tensor) and group["params"]:
                    group[name] = value.to(group["params"][0].device)

    def unscaled_grads(
        self, group: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Collects the gradients of a group, unscaled and in fp32 at least. Nothing waits for it.

        Returns:
            The parameters that have a gradient; their gradients, or this rank's shards of them; and
            `active` (), 0 where `found_inf` says that the step must be skipped, else 1, or None
            where `found_inf` is not set. In a skipped step the gradients are zeros, because 0 times
            a non-finite number is not 0. p.grad is never written.
        """
        parameters = [p for p in group["params"] if p.grad is not None]
        grads = [local(p.grad) for p in parameters]
        grads = [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
        if self.loss_scale is not None and grads:
            grads = list(torch._foreach_div(grads, self.loss_scale.to(grads[0].device)))
        if self.found_inf is None:
            return parameters, grads, None
        found_inf = self.found_inf.to(grads[0].device) if grads else self.found_inf
        skip, zero = found_inf > 0, torch.zeros((), device=found_inf.device)
        grads = [torch.where(skip, zero, grad) for grad in grads]  # one kernel each
        return parameters, grads, (found_inf == 0).double()

    def moments(
        self, parameters: list[Tensor], like: list[Tensor], *names: str
    ) -> list[list[Tensor]]:
        """For each name, the states of that name of all parameters; missing ones begin as zeros.

        Args:
            like: a tensor of the kind of each state, and this rank's shard of a sharded one.
        """
        for p, each in zip(parameters, like):
            for name in names:
                if name not in self.state[p]:
                    self.state[p][name] = sharded_like(torch.zeros_like(each), p)
        return [[local(self.state[p][name]) for p in parameters] for name in names]

    def step_along(
        self,
        updates: list[Tensor],
        parameters: list[Tensor],
        *,
        group: dict[str, Any],
        active: Tensor | None,
    ) -> None:
        """Takes SGD's step, with momentum, along updates in place of gradients.

        Args:
            updates: with weight decay; overwritten where `active` is given.
            parameters: the parameters.
            group: the hyper-parameters lr, momentum and nesterov.
            active: see `unscaled_grads`.
        """
        if momentum := group["momentum"]:
            (buffers,) = self.moments(parameters, updates, "momentum_buffer")
            if active is None:
                torch._foreach_mul_(buffers, momentum)
            else:  # in a skipped step the buffers stay, and no weight decay is added to them
                kept = 1 - active * (1 - momentum)
                torch._foreach_mul_(buffers, foreach_scalar(kept, buffers))
                torch._foreach_mul_(updates, foreach_scalar(active, updates))
            torch._foreach_add_(buffers, updates)
            if group["nesterov"]:
                updates = list(torch._foreach_add(updates, buffers, alpha=momentum))
            else:
                updates = buffers
        if active is not None:
            updates = list(torch._foreach_mul(updates, foreach_scalar(active, updates)))
        subtract_updates(parameters, updates, lr=group["lr"])


class CommunicatingOptimizer(GradScalerOptimizer):
    """An optimizer that communicates between the ranks itself, such as SLAMB.

    Each rank hands it its own gradients: the model is not wrapped for data parallelism. Between two
    averagings the weights and the state differ between the ranks.
    """

    skipped: Tensor  # (), 1 if the last step was skipped on all ranks, else 0; set by `step`

    def average_weights(self) -> None:
        """Replaces the weights by their mean over the ranks, a collective; here they are equal."""

    @abstractmethod
    def take_traffic(self) -> Any:
        """Returns this rank's `averaging.Traffic` in all collectives since the last call."""

    def start_epoch(self, epoch: int) -> None:
        """Applies what is scheduled by epochs, counted from 0; here nothing is."""

    def epoch_metrics(self) -> dict[str, float]:
        """Returns what the optimizer adds to the metrics of an epoch."""
        return {}


def step_unless_skipped(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Performs the optimizer's step unless `skip`, a scalar, is true.

    Our optimizers and torch's fused ones read it on the device, so that nothing waits.
    """
    reads_it = getattr(optimizer, "_step_supports_amp_scaling", False)  # as torch's GradScaler asks
    if isinstance(optimizer, GradScalerOptimizer) or reads_it:
        optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
    elif not skip:
        optimizer.step()


def foreach_scalar(value: Tensor, tensors: list[Tensor]) -> Tensor:
    """Returns a scalar tensor () in the dtype of a list, by which the list is to be multiplied.

    On a GPU torch multiplies the whole list in a few kernels only where the dtypes are equal.
    """
    return value.to(functools.reduce(torch.promote_types, {tensor.dtype for tensor in tensors}))


def tensor_norms(tensors: list[Tensor]) -> Tensor:
    """Returns the Euclidean norm of each tensor, shape (tensors,), computed in fp32 at least.

    The norm of 2,000 fp16 weights of 2,000 each would overflow fp16.
    """
    wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    return torch.stack(torch._foreach_norm(wide))


def global_norm(tensors: list[Tensor]) -> Tensor:
    """Returns the Euclidean norm () of all tensors together, computed in their own precision."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def subtract_updates(
    parameters: list[Tensor], updates: list[Tensor], *, lr: float | Tensor
) -> None:
    """Subtracts lr * updates from the parameters; the product has the updates' precision.

    A rate of one element on the device is not read by the host, so that a CUDA graph can contain
    the step.
    """
    lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
    if any(p.dtype != update.dtype for p, update in zip(parameters, updates)):
        for p, update in zip(parameters, updates):
            p.copy_(p - lr * update)
    elif isinstance(lr, Tensor):
        rate = foreach_scalar(lr, updates)
        torch._foreach_sub_(parameters, torch._foreach_mul(updates, rate))
    else:
        torch._foreach_add_(parameters, updates, alpha=-lr)
