"""last.pt and best.pt of a run folder.

manager = CheckpointManager(train_state, log, metadata)
manager.save(progress, previous_best=None)     # collective
manager.restore(manager.load_last())
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training import checkpoint
from training.progress import Progress
from training.run_log import RunLog
from training.train_state import TrainState


class CheckpointManager:
    """Writes last.pt and best.pt.

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
        }
        unsaved = {"last", "best"} if is_best else {"last"}
        try:
            if world.is_main:
                if is_best:
                    checkpoint.save(folder / "best.pt", content)
                    unsaved.discard("best")
                checkpoint.save_last(folder, content, keep=self.keep)
                unsaved.discard("last")
        except OSError as error:
            self.log.info(f"warning: {error}; the previous checkpoint is kept and the run goes on")
        self.unsaved = world.broadcast(unsaved)
        if previous_best is not None and "best" in self.unsaved:
            progress.best = previous_best

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
