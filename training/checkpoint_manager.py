"""last.pt and best.pt of a run folder.

manager = CheckpointManager(train_state, log, metadata)
manager.save(progress, previous_best=None)     # collective
manager.wait()                                 # for what is written in the background
manager.restore(manager.load_last())
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.torch_compat import unavailable_reason
from distributed import fsdp, sharded_checkpoint
from distributed.world import World, new_group
from errors import DiskFull
from training import checkpoint
from training.atomic_file import atomic_write, sync_folder
from training.progress import Progress
from training.run_log import RunLog
from training.train_state import TrainState

BACKGROUND_BYTES = 50e6  # of weights, from which on a save goes on in the background by default


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment: what a save writes.

    Attributes:
        content: of last.pt; empty on ranks that do not write it.
        tensors: of this rank, for the folder of shards; None where the model is not sharded.
        is_best: whether it is written as best.pt as well.
    """

    content: dict[str, Any]
    tensors: dict[str, Tensor] | None
    is_best: bool


@dataclass(frozen=True)
class PendingSave:
    """A save in the background.

    Attributes:
        unsaved: becomes what could not be written, of 'last' and 'best'; rank 0's is right.
        progress: of the run.
        previous_best: the best epoch before, where this save is the best; else None.
    """

    unsaved: Future[set[str]]
    progress: Progress
    previous_best: dict[str, Any] | None


class CheckpointManager:
    """Writes last.pt and best.pt, and beside them the weights of a sharded model.

    A save in the background copies the state, which takes the loop a moment, and writes the copy in
    a thread. There is one at a time: the next one waits for it.

    Args:
        train_state: what is saved.
        log: the run folder and the console.
        metadata: plain values at the top of every checkpoint: script, flags, what inference needs.
        keep: how many checkpoints stay; those before last.pt are last-1.pt, last-2.pt and so on.
        in_background: write in the background; None is where the weights are large.
    """

    def __init__(
        self,
        train_state: TrainState,
        log: RunLog,
        metadata: dict[str, Any],
        *,
        keep: int = 1,
        in_background: bool | None = False,
    ) -> None:
        self.train_state, self.log, self.metadata, self.keep = train_state, log, metadata, keep
        self.unsaved: set[str] = set()  # of 'last' and 'best': what the last save failed to write
        self.is_sharded = fsdp.is_sharded(train_state.model)
        self.pending: PendingSave | None = None
        self.thread: ThreadPoolExecutor | None = None
        self.writers = train_state.world  # the ranks, as the thread sees them
        if in_background is None:
            weights = train_state.model.parameters()
            size = sum(weight.numel() * weight.element_size() for weight in weights)
            in_background = size > BACKGROUND_BYTES and not unavailable_reason("staging")
        if in_background:
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self.stager = create_stager()
            if self.is_sharded and self.writers.size > 1:
                # Collectives of the thread must not mix with those of the loop.
                group = new_group(backend="gloo")
                self.writers.patient_groups.append(group)
                self.writers = replace(self.writers, control=group)

    # ---------------------------------------------------------------- saving

    def save(
        self,
        progress: Progress,
        *,
        previous_best: dict[str, Any] | None = None,
        in_background: bool = True,
    ) -> None:
        """Write last.pt, and best.pt if it is the best; collective.

        Where there is no room, the older checkpoints are given up, the oldest first. If that is not
        enough, it is reported, last.pt stays as it was, and the run goes on; `unsaved` then names
        the files, on every rank, when `wait` has returned.

        Args:
            progress: of the run.
            previous_best: the best epoch before, if this one is the best. It becomes that of the
                progress again if best.pt cannot be written, so that a later epoch can be the best.
            in_background: may be False where the run ends at once.
        """
        self.wait()
        snapshot = self._snapshot(progress, is_best=previous_best is not None)
        world, written = self.train_state.world, Future[set[str]]()
        if self.thread is not None and in_background:
            staged = Snapshot(
                self.stager.stage(snapshot.content),
                self.stager.stage(snapshot.tensors),
                snapshot.is_best,
            )
            written = self.thread.submit(self._write, staged, self.writers)
            self.pending = PendingSave(written, progress, previous_best)
            return
        written.set_result(self._write(snapshot, world))
        self.pending = PendingSave(written, progress, previous_best)
        self.wait()

    def wait(self) -> None:
        """Wait until the last save is over; collective."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        self.unsaved = self.train_state.world.broadcast(pending.unsaved.result())
        if pending.previous_best is not None and "best" in self.unsaved:
            pending.progress.best = pending.previous_best

    def close(self) -> None:
        """Let this rank's thread finish what it writes; for the end of a run, also by an error."""
        if self.thread is not None:
            self.thread.shutdown()

    def _snapshot(self, progress: Progress, *, is_best: bool) -> Snapshot:
        """What is to be written; its tensors may be those of the run themselves. Collective."""
        state = self.train_state
        shards = ""
        if self.is_sharded:
            shards = state.world.broadcast(sharded_checkpoint.next_name(self.log.folder))
        content = {
            **self.metadata,
            **state.state_dict(),
            "progress": progress.state_dict(),
            "shards": shards,
        }
        tensors = None
        if self.is_sharded:
            tensors = sharded_checkpoint.named_tensors(state.model, state.optimizer)
        return Snapshot(content if state.world.is_main else {"shards": shards}, tensors, is_best)

    def _write(self, snapshot: Snapshot, world: World) -> set[str]:
        """Write a snapshot, on the ranks of `world`; returns what could not be written."""
        unsaved = {"last", "best"} if snapshot.is_best else {"last"}
        content, tensors, folder = snapshot.content, snapshot.tensors, self.log.folder
        shards = folder / content["shards"]
        try:
            if tensors is not None:
                self._make_room_for(lambda: sharded_checkpoint.write(shards, tensors, world), world)
                sync_folder(shards)
                sync_folder(folder)
            if world.is_main:
                if tensors is not None:
                    content["shards_checksum"] = sharded_checkpoint.checksum(shards)
                self._make_room_for(lambda: self._write_last(content), World())
                unsaved.discard("last")
                if snapshot.is_best:
                    checkpoint.link_checkpoint(folder / "last.pt", "best.pt")
                    unsaved.discard("best")
        except OSError as error:
            self.log.info(f"warning: {error}; the previous checkpoint is kept and the run goes on")
        if world.is_main:
            delete_unused_shards(self.log.folder)
        return unsaved

    def _write_last(self, content: dict[str, Any]) -> None:
        checkpoint.save(self.log.folder / "last.pt", content, keep=self.keep)

    def _make_room_for(self, write: Callable[[], None], world: World) -> None:
        """Call `write`, and again for each older checkpoint that can be given up for it.

        Args:
            write: raises DiskFull, on all ranks alike, if there is no room.
            world: the ranks that call it.
        """
        while True:
            try:
                return write()
            except DiskFull:
                if not world.broadcast(world.is_main and self._give_up_oldest()):
                    raise

    def _give_up_oldest(self) -> bool:
        """Delete the oldest checkpoint before last.pt; returns whether there was one."""
        older = checkpoint.older_files(self.log.folder)
        if not older:
            return False
        oldest = older[max(older)]
        oldest.unlink()
        delete_unused_shards(self.log.folder)
        self.log.info(f"warning: the disk is full; {oldest} is deleted to make room")
        return True

    # ---------------------------------------------------------------- restoring

    def restore(self, content: dict[str, Any]) -> None:
        """Load everything but the progress from what `checkpoint.load` returned; collective.

        A checkpoint of this run folder that is not last.pt becomes it: what is newer is damaged.
        """
        world, path, folder = self.train_state.world, Path(content["file"]), self.log.folder
        self.train_state.load_state_dict(content)
        is_ours = path.resolve().parent == folder.resolve()
        if not is_ours or path.name == "last.pt":
            return
        world.max_over_ranks(0)  # all ranks have opened the file by its old name
        if world.is_main:
            try:
                checkpoint.make_last(path)
            except OSError as error:
                self.log.info(f"warning: last.pt could not be replaced ({error.strerror})")

    def repair_best(self, progress: Progress) -> None:
        """Let best.pt and the progress name the same epoch after a resume; collective.

        They differ where the process was killed, or the disk was full, between the writing of
        last.pt and of best.pt. If last.pt is the best epoch, best.pt is written again; otherwise
        the best epoch is the one that best.pt holds.
        """
        world, folder = self.train_state.world, self.log.folder
        if world.is_main:
            stored = checkpoint.read_progress(folder / "best.pt", verify=True)
            # A best epoch that this run has yet to reach is of a checkpoint that was lost.
            is_past = stored is not None and stored["best"]["epoch"] <= progress.epoch
            held = stored["best"] if stored and is_past else Progress().best
            is_last = progress.best["epoch"] == progress.epoch and not progress.step_in_epoch
            if held["epoch"] != progress.best["epoch"]:
                try:
                    if not is_last:
                        raise OSError(f"best.pt does not hold epoch {progress.best['epoch']}")
                    checkpoint.link_checkpoint(folder / "last.pt", "best.pt")
                except OSError as error:
                    self.log.info(f"warning: {error}: the best epoch is chosen from there on")
                    progress.best = held
        progress.best = world.broadcast(progress.best)

    def copy_best(self, source: Path, progress: Progress) -> None:
        """Copy best.pt of another run folder, which this run goes on from; rank 0 alone does it.

        Args:
            source: the other folder.
            progress: of this run. If its best epoch is not that of the file, nothing is copied.
        """
        epoch, path, folder = progress.best["epoch"], source / "best.pt", self.log.folder
        if not self.train_state.world.is_main or epoch == 0:
            return
        stored = checkpoint.read_progress(path)
        if stored is None or stored["best"]["epoch"] != epoch:
            return
        shards = Path(checkpoint.load(path, self.metadata["script"]).get("shards", ""))
        try:
            if shards.name:
                shutil.copytree(shards, folder / shards.name, dirs_exist_ok=True)
            with atomic_write(folder / "best.pt") as temporary:
                shutil.copyfile(path, temporary)
        except OSError as error:
            self.log.info(f"warning: {path} could not be copied ({error.strerror})")

    def load_last(self) -> dict[str, Any]:
        """The content of last.pt, or of the one before where that is damaged; collective."""
        self.wait()
        content = checkpoint.load(self.log.folder, self.metadata["script"])
        if "warning" in content:
            self.log.info(content["warning"])
        return content


def delete_unused_shards(folder: Path) -> None:
    """Delete the shards that no checkpoint of a run folder names."""
    used = set()
    if not any(folder.glob("shards-*")):
        return
    for path in folder.glob("*.pt"):
        try:
            path.open("rb").close()
        except OSError:
            return  # it cannot be read just now, and what it names must stay
        used.add(str(checkpoint.read_description(path).get("shards", "")))
    sharded_checkpoint.delete_others(folder, keep=used)


def create_stager() -> Any:
    """What copies a state to memory of the CPU, which it uses again for the next one.

    With a GPU the memory is pinned, and the copies of all tensors are under way together.
    """
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    has_gpu = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=has_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=has_gpu,
        )
    )
