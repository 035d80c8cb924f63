"""When and where a run writes its checkpoints: last.pt and those before it, and best.pt.

checkpointer = Checkpointer(parts, progress, log, metadata={"script": "resnet50_test"}, keep=1)
checkpointer.save()                            # collective, as all methods are
checkpointer.save(best=best)                   # best.pt as well
checkpoint = checkpointer.load_last()
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from distributed.agreement import on_main
from distributed.world import World
from training import checkpoint
from training.atomic_file import atomic_write
from training.checkpoint import Checkpoint
from training.progress import Progress
from training.run_log import RunLog
from training.train_state import TrainState, has_moments


@dataclass(eq=False)
class Checkpointer:
    """Writes the checkpoints of a run into its folder."""

    parts: TrainState
    progress: Progress
    log: RunLog
    _: KW_ONLY
    metadata: dict[str, Any]  # plain values that every checkpoint begins with: script, flags, card
    keep: int  # how many checkpoints stay: last.pt and those before it
    # Of 'last' and 'best', what the last save failed to write.
    unsaved: set[str] = field(default_factory=set, init=False)
    is_warned: bool = field(default=False, init=False)  # that no run goes on from them

    @property
    def world(self) -> World:
        return self.parts.world

    def save(
        self,
        *,
        best: dict[str, Any] | None = None,
        shown: Mapping[str, Any] | None = None,
    ) -> None:
        """Write last.pt, and before it best.pt if it is the best.

        Where that fails, as on a full disk, it is reported and the run goes on; `unsaved` then
        names the files.

        Args:
            best: what `Progress.best` becomes if this epoch is the best, unless best.pt cannot be
                written, so that a later epoch can be the best.
            shown: entries that take the place of those of the parts, for inference.
        """
        before, is_best = self.progress.best, best is not None
        self.progress.best = best or before
        with self.world.waiting_at_most(self.world.limits.start):
            if not is_best:
                self.renew_folder()
            state, progress = self.parts.state_dict(), self.progress.state_dict()
            content = {**self.metadata, **state, **(shown or {}), "progress": progress}

            def write() -> set[str]:
                if not has_moments(state) and not self.is_warned:
                    self.is_warned = True
                    self.log.info(
                        f"warning: the state of {state['optimizer_kind']} holds objects that torch "
                        "does not read back: checkpoints have the weights, but no run goes on from "
                        "them"
                    )
                unsaved, folder = {"last", *(["best"] if is_best else [])}, self.log.folder
                try:
                    if is_best:
                        checkpoint.save(folder / "best.pt", content)
                        unsaved.discard("best")
                    checkpoint.save_last(folder, content, keep=self.keep)
                    unsaved.discard("last")
                except OSError as error:
                    is_kept = bool(checkpoint.latest_files(folder))
                    kept = "the previous checkpoint is kept" if is_kept else "no checkpoint is left"
                    self.log.info(f"warning: {error}; {kept}")
                return unsaved

            self.unsaved = on_main(self.world, write)
        if "best" in self.unsaved:
            self.progress.best = before

    def load_last(self) -> Checkpoint:
        """Return the last checkpoint; rank 0 sends it where not all nodes have it."""
        folder, script = self.log.folder, self.metadata["script"]
        with self.world.waiting_at_most(self.world.limits.start):
            mine = checkpoint.load(folder, script) if checkpoint.latest_files(folder) else None
            seconds = mine and mine.progress["seconds"]  # which no two checkpoints share
            found = self.world.all_gather(seconds)
            if mine is None or None in found or len(set(found)) > 1:
                mine = on_main(self.world, lambda: checkpoint.load(folder, script))
        if mine.warning:
            self.log.info(mine.warning)
        return mine

    def renew_folder(self) -> None:
        """Make the run folder again if it is gone, and choose the best epoch from here on."""
        if on_main(self.world, lambda: self.log.make_again(self.progress.rows)):
            self._settle_best()

    def settle_files(self, path: Path) -> None:
        """Settle last.pt and best.pt after the checkpoint at `path` was loaded, on every rank.

        An older checkpoint takes the name of last.pt, which is damaged. A new folder gets its
        last.pt, and best.pt from beside `path`. The best epoch is chosen anew if best.pt does not
        hold it: where it is damaged, or of an epoch that the lost last.pt had reached.
        """
        folder, is_older = self.log.folder, checkpoint.OLDER_NAME.fullmatch(path.name)
        is_here = path.resolve().parent == folder.resolve()
        if self.world.is_main and is_older and is_here:
            path.replace(folder / "last.pt")
        if self.world.is_main and not is_here:
            found = checkpoint.read_progress(path.parent / "best.pt")
            if found is not None and found["best"] == self.progress.best:
                with contextlib.suppress(OSError), atomic_write(folder / "best.pt") as copied:
                    shutil.copyfile(path.parent / "best.pt", copied)
        self._settle_best()
        if not is_here:
            self.save()

    def _settle_best(self) -> None:
        """Choose the best epoch from here on if best.pt does not hold it."""
        folder, progress, epoch = self.log.folder, self.progress, self.progress.best["epoch"]
        if self.world.is_main and epoch:
            stored = checkpoint.read_progress(folder / "best.pt")
            if stored is None or stored["best"]["epoch"] != epoch:
                self.log.info(
                    f"best.pt of epoch {epoch} is not in {folder}: "
                    "the best epoch is chosen from here on"
                )
                progress.best, progress.since = Progress().best, len(progress.rows)
        progress.best, progress.since = self.world.broadcast((progress.best, progress.since))
