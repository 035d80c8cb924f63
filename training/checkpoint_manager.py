"""last.pt and best.pt of a run folder.

manager = CheckpointManager(train_state, log, metadata)
manager.save(progress, best=True)              # collective
manager.restore(manager.load_last())
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from distributed import fsdp, sharded_checkpoint
from training import checkpoint
from training.atomic_file import atomic_write
from training.progress import Progress
from training.run_log import RunLog
from training.train_state import TrainState


class CheckpointManager:
    """Writes last.pt and best.pt, and beside them the weights of a sharded model.

    Args:
        train_state: what is saved.
        log: the run folder and the console.
        metadata: plain values at the top of every checkpoint: script, flags, what inference needs.
    """

    def __init__(self, train_state: TrainState, log: RunLog, metadata: dict[str, Any]) -> None:
        self.train_state, self.log, self.metadata = train_state, log, metadata
        self.shards: dict[str, str] = {}  # of 'last' and 'best': the name of the folder of shards
        self.unsaved: set[str] = set()  # of 'last' and 'best': what the last save failed to write

    def save(self, progress: Progress, best: bool = False) -> None:
        """Write last.pt, and best.pt if it is the best; collective.

        A full disk is reported, the previous file kept, and the run goes on; `unsaved` then names
        the files, on every rank.
        """
        unsaved = {"last", "best"} if best else {"last"}
        state, folder = self.train_state, self.log.folder
        world, is_sharded = state.world, fsdp.is_sharded(state.model)
        shards = world.broadcast(sharded_checkpoint.next_name(folder)) if is_sharded else ""
        content = {
            **self.metadata,
            **state.state_dict(),
            "progress": progress.state_dict(),
            "shards": shards,
        }
        try:
            if shards:
                sharded_checkpoint.save(folder / shards, state.model, state.optimizer, world)
            if world.is_main:
                checkpoint.save(folder / "last.pt", content)
                self.shards["last"] = shards
                unsaved.discard("last")
                if best:
                    self._link_best()
                    unsaved.discard("best")
        except OSError as error:
            self.log.info(f"warning: {error}; the previous checkpoint is kept and the run goes on")
        if world.is_main:
            sharded_checkpoint.delete_others(folder, keep=set(self.shards.values()))
        self.unsaved = world.broadcast(unsaved)

    def _link_best(self) -> None:
        """Make last.pt the best checkpoint as well."""
        checkpoint.link_checkpoint(self.log.folder / "last.pt", "best.pt")
        self.shards["best"] = self.shards.get("last", "")

    def restore(self, content: dict[str, Any]) -> None:
        """Load everything but the progress from what `checkpoint.load` returned; collective."""
        self.train_state.load_state_dict(content)
        folder = self.log.folder
        if self.train_state.world.is_main and any(folder.glob("shards-*")):
            for path in (folder / "last.pt", folder / "best.pt"):
                if path.exists():
                    stored = checkpoint.load(path, self.metadata["script"])
                    self.shards[path.stem] = Path(stored.get("shards", "")).name

    def repair_best(self, progress: Progress) -> None:
        """Let best.pt and the progress name the same epoch after a resume; collective.

        They differ where the process was killed, or the disk was full, between the writing of
        last.pt and of best.pt. If last.pt is the best epoch, best.pt is written again; otherwise
        the best epoch is the one that best.pt holds.
        """
        world, folder = self.train_state.world, self.log.folder
        if world.is_main:
            stored = checkpoint.read_progress(folder / "best.pt")
            held = stored["best"] if stored else Progress().best
            is_last = progress.best["epoch"] == progress.epoch and not progress.step_in_epoch
            if held["epoch"] != progress.best["epoch"]:
                try:
                    if not is_last:
                        raise OSError(f"best.pt is of epoch {held['epoch']}")
                    self._link_best()
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
            return
        self.shards["best"] = shards.name

    def load_last(self) -> dict[str, Any]:
        """The content of last.pt."""
        return checkpoint.load(self.log.folder / "last.pt", self.metadata["script"])
