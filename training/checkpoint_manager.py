"""last.pt and best.pt of a run folder.

manager = CheckpointManager(train_state, log, metadata)
manager.save(progress, previous_best=None)     # collective
manager.restore(manager.load_last())
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from distributed import fsdp, sharded_checkpoint
from training import checkpoint
from training.atomic_file import sync_folder
from training.progress import Progress
from training.run_log import RunLog
from training.train_state import TrainState


class CheckpointManager:
    """Writes last.pt and best.pt, and beside them the weights of a sharded model.

    Args:
        metadata: plain values at the top of every checkpoint: script, flags, what inference needs.
        keep: how many checkpoints stay; those before last.pt are last-1.pt, last-2.pt and so on.
    """

    def __init__(
        self, train_state: TrainState, log: RunLog, metadata: dict[str, Any], *, keep: int = 1
    ) -> None:
        self.train_state, self.log, self.metadata, self.keep = train_state, log, metadata, keep
        self.unsaved: set[str] = set()  # of 'last' and 'best': what the last save failed to write

    def save(self, progress: Progress, *, previous_best: dict[str, Any] | None = None) -> None:
        """Write last.pt, and before it best.pt if it is the best; collective.

        Where that fails, as on a full disk, it is reported and the run goes on; `unsaved` then
        names the files, on every rank.

        Args:
            previous_best: the best epoch before, if this one is the best. It becomes that of the
                progress again if best.pt cannot be written, so that a later epoch can be the best.
        """
        world, folder, is_best = self.train_state.world, self.log.folder, previous_best is not None
        content = {
            **self.metadata,
            **self.train_state.state_dict(),
            "progress": progress.state_dict(),
            "shards": "",
        }
        unsaved = {"last", "best"} if is_best else {"last"}
        try:
            if fsdp.is_sharded(self.train_state.model):
                content |= self._save_shards()
            if world.is_main:
                if is_best:
                    checkpoint.save(folder / "best.pt", content)
                    unsaved.discard("best")
                checkpoint.save_last(folder, content, keep=self.keep)
                unsaved.discard("last")
        except OSError as error:
            self.log.info(f"warning: {error}; the previous checkpoint is kept and the run goes on")
        if world.is_main:
            self._delete_unused_shards()
        self.unsaved = world.broadcast(unsaved)
        if previous_best is not None and "best" in self.unsaved:
            progress.best = previous_best

    def _save_shards(self) -> dict[str, Any]:
        """Write a new folder of shards; returns the entries of last.pt that name it. Collective.

        Raises:
            OSError: a rank could not write; on every rank.
        """
        state = self.train_state
        numbers = [int(old.name.partition("-")[2]) for old in self._shards()]
        folder = self.log.folder / f"shards-{state.world.broadcast(max(numbers, default=0)) + 1}"
        checksum = sharded_checkpoint.save(folder, state.model, state.optimizer, state.world)
        sync_folder(folder)
        return {"shards": folder.name, "shards_checksum": checksum}

    def _shards(self) -> list[Path]:
        """The folders of shards in the run folder."""
        folders = self.log.folder.glob("shards-*")
        return [path for path in folders if checkpoint.SHARDS_NAME.fullmatch(path.name)]

    def _delete_unused_shards(self) -> None:
        """Delete the shards that no .pt file of the folder names; all stay if one is damaged."""
        if shards := self._shards():
            with contextlib.suppress(Exception):  # of many types for many kinds of damage
                files = map(checkpoint.read_unchecked, self.log.folder.glob("*.pt"))
                used = {str(state.get("shards")) for state in files}
                for path in shards:
                    if path.name not in used:
                        shutil.rmtree(path, ignore_errors=True)

    # ---------------------------------------------------------------- restoring

    def load_last(self) -> dict[str, Any]:
        """The content of last.pt, or of the newest before it that is not damaged; collective."""
        content = checkpoint.load(self.log.folder, self.metadata["script"])
        if "warning" in content:
            self.log.info(content["warning"])
        return content

    def resume_from(self, path: Path, progress: Progress) -> None:
        """Settle last.pt and best.pt after a resume; collective.

        An older checkpoint takes the name of last.pt, which is damaged. The best epoch is chosen
        anew if best.pt does not hold it: in another run folder, or where best.pt is damaged or of
        an epoch that the lost last.pt had reached.

        Args:
            path: the checkpoint that was loaded, on every rank.
        """
        world, folder, epoch = self.train_state.world, self.log.folder, progress.best["epoch"]
        is_older = checkpoint.OLDER_NAME.fullmatch(path.name)
        if world.is_main and is_older and path.resolve().parent == folder.resolve():
            path.replace(folder / "last.pt")
        if world.is_main and epoch:
            stored = checkpoint.read_progress(folder / "best.pt")
            if stored is None or stored["best"]["epoch"] != epoch:
                self.log.info(
                    f"best.pt of epoch {epoch} is not in {folder}: "
                    "the best epoch is chosen from here on"
                )
                progress.best = Progress().best
        progress.best = world.broadcast(progress.best)
