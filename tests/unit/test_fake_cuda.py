"""Everything that a GPU does in a run, on a GPU that is not there: see fake_cuda.py.

torch raises where a tensor is on the wrong device. Where the host waits for the GPU, the test
names the functions in which it may.
"""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import fake_cuda
import mixup
from backends.cuda_graph import RECORDED_OPTIMIZERS
from backends.precision import Precision
from cli.optimizers import optimizer_choice
from conftest import each_of
from distributed import fsdp
from distributed.comm_hooks import AllReduceHook, LocalSGD, RoundedGradients
from distributed.diloco import DiLoCo
from distributed.world import World
from fake_cuda import CUDA, FakeGpu, Recording, fake_world
from input_pipeline.augmentation import Augmentation
from input_pipeline.image_batches import ImageDataset
from input_pipeline.image_datasets import ImageSplit
from models import image_models
from models.residual import residual_blocks
from ngd import NGD
from trainers import build_optimizer, image_network, make_trainer
from training.batch_sampler import DynamicBatchSampler, RankBatch
from training.checkpoint import Checkpoint, to_cpu
from training.losses import CrossEntropy, MixedCrossEntropy
from training.meta_learner import MetaLearner
from training.step_stats import NoiseMeter
from training.trainer import LOG_INTERVAL, Trainer

REASON = fake_cuda.unavailable_reason()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

ON_RANKS = ["slamb", "slamb-int8"]
OPTIMIZERS = [*RECORDED_OPTIMIZERS, "kaldi_ngd", "muon", *ON_RANKS]
# Memory that is laid out at an optimizer's first step, or after its state was loaded.
LAYOUT = {"flat_buffer.__init__", "flat_buffer.shuffled"}
LAYOUT |= {"ngd.__init__", "slamb.__init__", "slamb.<dictcomp>"}


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes ten or twenty steps in a run takes three here."""
    monkeypatch.setattr("optimizers.kaldi_ngd.FIRST_UPDATES", 3)
    monkeypatch.setitem(LOG_INTERVAL, "cuda", 3)


def network() -> nn.Module:
    return image_network(nn.BatchNorm2d(18))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the entry scripts; of slamb the variants as well."""
    kind, _, variant = name.partition("-")
    settings: dict[str, Any] = {"dense_steps": 3, "local_steps": 4} if kind == "slamb" else {}
    if variant == "int8":
        settings["wire_bits"] = 8
    return build_optimizer(model, kind, 0.1, 1e-3, **settings)


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    images = torch.empty(rows, 3, 8, 8, device=CUDA)
    return images, torch.empty(rows, dtype=torch.long, device=CUDA)


# -------------------------------------------------------------------- optimizers


@each_of(("name", "size"), [(n, 1) for n in OPTIMIZERS] + [(n, 2) for n in ON_RANKS])
def test_a_step_waits_for_nothing_also_after_its_state_was_saved_and_loaded(name, size):
    with fake_world(size), FakeGpu() as gpu:
        model = gpu.model(network())
        optimizer = optimizer_of(name, model)

        def step(**scaling: Any) -> None:
            gpu.set_gradients()
            for attribute, value in scaling.items():
                setattr(optimizer, attribute, value)
            optimizer.step()
            optimizer.zero_grad()

        def set_lr(lr: float) -> None:
            for group in optimizer.param_groups:
                group["lr"] = torch.full((), lr, device=CUDA) if name in RECORDED_OPTIMIZERS else lr

        with gpu.waiting() as first:
            step()
        assert first.keys() <= LAYOUT
        step(found_inf=torch.zeros((), device=CUDA))
        for number in range(8):
            set_lr(0.1 / (1 + number))
            scaling = {each: torch.empty((), device=CUDA) for each in ("found_inf", "grad_scale")}
            step(**scaling)
        with gpu.waiting():
            saved = to_cpu(optimizer.state_dict())
            model = gpu.model(network())
            optimizer = optimizer_of(name, model)
            optimizer.load_state_dict(saved)
            set_lr(0.1)
            step()
        step(found_inf=torch.empty((), device=CUDA))
        gpu.set_gradients()
        next(model.parameters()).grad = None
        optimizer.step()
        kept = tree_leaves([*optimizer.state.values(), *optimizer.param_groups])
        tensors = [each for each in kept if isinstance(each, Tensor)]
        assert tensors
        assert all(tensor.is_cuda for tensor in tensors)


def test_ngds_step_with_shards_waits_for_nothing():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    with fake_world(2), FakeGpu() as gpu:
        mesh = DeviceMesh("cuda", torch.arange(2))

        def sharded(shard: Tensor) -> Tensor:
            return DTensor.from_local(shard, mesh, [Shard(0)])

        shards = [p.detach() for p in gpu.model(network()).parameters()]
        optimizer = NGD([nn.Parameter(sharded(shard)) for shard in shards])
        for number in range(3):
            optimizer.found_inf = torch.empty((), device=CUDA)
            for p, shard in zip(optimizer.param_groups[0]["params"], shards):
                p.grad = sharded(torch.empty_like(shard))
            with gpu.waiting() if not number else contextlib.nullcontext():
                optimizer.step()
        assert optimizer.sharded[0].owned


@each_of("name", ["ngd", "kaldi_ngd", "lamb", "lars"])
def test_one_scale_serves_groups_on_several_gpus(name):
    with FakeTensorMode():
        weights = [nn.Parameter(torch.randn(8, 8, device=f"cuda:{i}")) for i in range(2)]
        optimizer = optimizer_choice(name).make([{"params": [p]} for p in weights], lr=0.1)
        for p in weights:
            p.grad = torch.randn_like(p)
        optimizer.grad_scale = torch.ones((), device="cuda:0")
        optimizer.found_inf = torch.zeros((), device="cuda:0")
        optimizer.step()


# What the host asks, and views that torch does not call so.
NO_KERNEL = {"promote_types", "_unsafe_view", "lift_fresh", "scalar_tensor", "empty_like"}


@each_of(("name", "most"), [("ngd", 240), ("kaldi_ngd", 400), ("lamb", 130), ("lars", 135)])
def test_a_step_of_40_matrices_launches_few_kernels(name, most):
    with FakeGpu() as gpu:
        model = gpu.model(nn.Sequential(*[nn.Linear(8, 8) for _ in range(40)]))
        optimizer = optimizer_of(name, model)
        optimizer.found_inf = torch.zeros((), device=CUDA)
        with gpu.waiting():
            for _ in range(3):
                gpu.set_gradients()
                with Recording() as step:
                    optimizer.step()
    # LAMB and LARS make each of two gradients a layer zero in a skipped step, and each matrix has
    # a trust ratio; NGD updates its estimates.
    called = [func for func, *_ in step.calls if func.namespace == "aten" and not func.is_view]
    assert sum(func.overloadpacket.__name__ not in NO_KERNEL for func in called) < most


# -------------------------------------------------------------------- training steps


def trainer_of(gpu, world, name="sgd", *, precision="fp32", **settings: Any) -> Trainer:
    model = gpu.model(network())
    dtype = torch.float16 if precision == "fp16" else None
    settings["precision"] = Precision(precision, "cuda", dtype)
    return make_trainer(model, optimizer_of(name, model), world, **settings)


@each_of("kind", [kind for kind in mixup.KINDS if kind not in ("none", "meta")])
def test_mixing_waits_for_nothing(kind):
    with FakeGpu() as gpu:
        sample_mix = functools.partial(mixup.sample_mix, kind, alpha=0.3)
        unmixed = CrossEntropy(0.1, torch.ones(10, device=CUDA))
        loss_fn = MixedCrossEntropy(sample_mix, False, unmixed=unmixed)
        model = gpu.model(network())
        inputs, labels = batch()
        for images in (inputs, inputs.contiguous(memory_format=torch.channels_last)):
            output = loss_fn(model, images, labels)
            assert output.loss.is_cuda
            assert output.mix_weight.is_cuda
            assert unmixed(model, images, labels).loss.is_cuda
        for mix in (mixup.mixup(labels, 0.3, per_sample=True), mixup.inter_class(labels, 0.3)):
            assert mixup.blend(inputs, mix).is_cuda


@each_of("size", [1, 2])
def test_meta_mixup_waits_for_nothing(size):
    with fake_world(size) as world, FakeGpu() as gpu:
        with gpu.waiting():
            meta = mixup.MetaMixup(32, device=CUDA)
        meta.wrong = 0.4
        loss_fn = MixedCrossEntropy(
            lambda labels, **size: meta.mix(labels), False, observe=meta.observe
        )
        learner = MetaLearner(meta, None, until=9)
        settings = {"precision": "fp16", "loss_fn": loss_fn, "meta_learner": learner}
        trainer = trainer_of(gpu, world, **settings)
        inputs, labels = batch()
        planned = RankBatch(torch.arange(len(labels)), 1.0, len(labels) * size)
        for _ in range(3):
            trainer.train_step(inputs, labels, planned)
        assert meta.row_losses.sums.is_cuda


# -------------------------------------------------------------------- what the ranks exchange


HOOKS: dict[str, Callable[[World], AllReduceHook]] = {
    "none": AllReduceHook,
    "bf16": lambda world: AllReduceHook(world, "bf16"),
    "int4": lambda world: RoundedGradients(world, "int4"),
    "sign": lambda world: RoundedGradients(world, "sign"),
    "local": lambda world: LocalSGD(world, 2, after=1),
    "diloco": lambda world: DiLoCo(world, 2, after=1),
}


@each_of("name", HOOKS)
def test_hooks_wait_for_nothing(name, monkeypatch):
    with fake_world(2) as world, FakeGpu() as gpu:
        future = mock.Mock()
        monkeypatch.setattr("distributed.comm_hooks.Future", future)
        hook = HOOKS[name](world)
        model = gpu.model(network())
        parameters = list(model.parameters())
        hook.start(parameters)
        meter = NoiseMeter(parameters, world)
        hook.observers.append(meter.add_bucket)
        flat = torch.empty(sum(p.numel() for p in parameters), device=CUDA)
        parts = flat.split([p.numel() for p in parameters])
        gradients = [part.view(p.shape) for part, p in zip(parts, parameters)]
        values = {"buffer": flat, "parameters": parameters, "gradients": gradients, "index": 0}
        bucket = mock.Mock(**{f"{name}.return_value": value for name, value in values.items()})
        with gpu.waiting() as waits:  # the places of the parameters, at the first bucket
            hook.run(None, bucket)
        assert waits.keys() <= {"step_stats.add_bucket"}
        for _ in range(4):
            hook.run(None, bucket)
            hook.after_step(parameters)
        hook.sync_replicas(parameters)
        with gpu.waiting() as waits:
            saved = to_cpu(hook.state_dict(parameters))
            hook.load_state_dict(saved, parameters)
        allowed = {"comm_hooks.<dictcomp>", "comm_hooks.state_dict", "comm_hooks.load_state_dict"}
        allowed |= {"diloco.<listcomp>", "diloco.load_state_dict"}
        assert waits.keys() <= allowed
        hook.run(None, bucket)
        assert all(made.kwargs == {"devices": [CUDA]} for made in future.call_args_list)
        results = future.return_value.set_result.call_args_list
        assert all(made.args[0].is_cuda for made in results)
        assert meter.squares.is_cuda


def test_shards_leave_no_copy_of_weights_for_the_backward_pass_and_norms_stay_in_fp32():
    saved: list[Tensor] = []
    computed: set[tuple[bool, torch.dtype]] = set()  # whether it is a norm, and in what

    def note(module: nn.Module, _: Any) -> None:
        computed.add((isinstance(module, nn.BatchNorm2d), module.weight.dtype))

    with fake_world(2) as world:
        world.device = torch.device("cpu")
        model = image_models.create_model("resnet8", classes=10, channels=3, image_size=8)
        blocks = residual_blocks(model)
        shapes = {p.shape for block in blocks for p in block.parameters() if p.ndim == 4}
        fsdp.shard(model, world, kind="fsdp", blocks=blocks, compute_dtype=torch.bfloat16)
        for module in (each for block in blocks for each in block.modules()):
            if hasattr(module, "weight"):
                module.register_forward_pre_hook(note)
        hooks = torch.autograd.graph.saved_tensors_hooks(saved.append, lambda nothing: nothing)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(8, 3, 8, 8)).sum()
    weights = [each for each in saved if each.shape in shapes]
    assert weights
    assert not any(each.untyped_storage().size() for each in weights), "FSDP cannot free a copy"
    assert computed == {(True, torch.float32), (False, torch.bfloat16)}


# -------------------------------------------------------------------- an epoch


SETTINGS = [
    (1, {}),
    (1, {"precision": "fp16", "accumulation_steps": 2, "max_grad_norm": 1.0}),
    (2, {"measure_noise_scale": True, "time_compute": True, "max_grad_norm": 1.0}),
]


@each_of("name", ["sgd", "ngd", "slamb"])
@each_of(("size", "settings"), SETTINGS)
def test_an_epoch_waits_at_logging_intervals_and_at_its_end(name, size, settings, monkeypatch):
    monkeypatch.setattr("dynamic_batch.NoiseScale.observe", lambda self, *squares, **sizes: 1.0)
    rows = 8 * 2 * LOG_INTERVAL["cuda"]
    with fake_world(size) as world, FakeGpu() as gpu:
        trainer = trainer_of(gpu, world, name, epochs=2, **settings)
        pixels = torch.zeros(rows, 8, 8, 3, dtype=torch.uint8)
        split = ImageSplit(torch.arange(rows) % 10, pixels, size=8)
        crops = Augmentation(pad=2, flip=True, fill="reflect")
        how = {"mean": [0.5] * 3, "std": [0.2] * 3, "device": CUDA, "resident": size == 1}
        with gpu.waiting():
            trainer.train_set = data = ImageDataset(split, crops, **how)
        trainer.eval_sets = {"test": data}
        trainer.batches = DynamicBatchSampler(rows, 8, world=world)
        for between_hosts in (
            "checkpointer.Checkpointer.save",
            "checkpointer.Checkpointer.renew_folder",
            "evaluation.raise_together",
        ):
            monkeypatch.setattr(f"training.{between_hosts}", mock.MagicMock())
        monkeypatch.setattr(World, "broadcast", lambda world, value: value)
        monkeypatch.setattr(World, "all_gather", lambda world, value: [value] * world.size)
        with gpu.waiting():
            trainer.train_epoch([])
            trainer.finish_epoch()
        with gpu.waiting() as waits:
            trainer.train_epoch([])
        assert waits == {
            "image_batches._gathered_batches": 2,  # once an epoch: offsets and flips
            "step_stats.read": 2 + 1,  # two intervals, and the end
        }
        with gpu.waiting() as waits:
            trainer.finish_epoch()
        timed = {"step_stats.elapsed"} if "time_compute" in settings else set()
        assert waits.keys() == {"step_stats.totals", "evaluation.evaluate"} | timed
        assert len(trainer.progress.rows) == 2


# -------------------------------------------------------------------- CUDA graphs


@each_of("name", RECORDED_OPTIMIZERS)
def test_a_resumed_run_through_graphs_reads_its_learning_rate_on_the_gpu(name):
    with fake_world(1) as world, FakeGpu() as gpu:
        plain = trainer_of(gpu, world, name)
        with gpu.waiting():
            plain.train_step(*batch())
            saved = to_cpu(plain.parts.state_dict())
            for group in saved["optimizer"]["param_groups"]:
                group["lr"] = torch.tensor(0.1)  # as a run through graphs has it
            recorded = trainer_of(gpu, world, name, record_cuda_graph=True)
            progress = plain.progress.state_dict()
            recorded.restore(Checkpoint(Path("last.pt"), {}, progress, saved))
            recorded.set_lr(0.05)
        groups = recorded.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        assert all(rate.is_cuda for rate in rates)
        recorded.set_lr(0.02)
        assert [group["lr"] for group in groups] == rates, "a recorded step reads these tensors"
        assert all(group.get("capturable", True) for group in groups)
        assert not any(group.get("capturable") for group in plain.optimizer.param_groups)
