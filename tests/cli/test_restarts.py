"""What a job does that torchrun starts again: it goes on with its own run, never with another's."""

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

from cli import options
from conftest import parser
from distributed.worker import launcher_id
from errors import InputError
from training.checkpoint import Checkpoint
from training.run_folder import check_overwritten

SMALL = "--dataset digits --arch resnet20 --epochs 3 --device cpu".split()


@pytest.fixture
def restarted(here, monkeypatch) -> None:
    """The current folder is empty, and torchrun has restarted this process in it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "faster-training")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")


def copy_run(run: Path, folder: str, *launchers: str) -> Path:
    """A copy of a finished run, as jobs of these launchers would have left it."""
    shutil.copytree(run, folder)
    config = Path(folder) / "config.json"
    known = {"elastic_id": "faster-training", "launchers": launchers}
    config.write_text(json.dumps({**json.loads(config.read_text()), **known}))
    return Path(folder)


def delete_checkpoints(folder: Path) -> None:
    """Delete last.pt and those that were kept before it."""
    for path in folder.glob("last*.pt"):
        path.unlink()


def parse(*words: object) -> tuple[str | None, str | None]:
    """The run folder of these flags, and the checkpoint that the run goes on from."""
    args, found = options.parse(parser("images"), "resnet50_test", [*SMALL, *map(str, words)])
    return args.out, found and str(found.file)


def test_a_restarted_job_goes_on_with_its_own_run_and_no_other(runs, restarted):
    copy_run(runs["images"], "runs/resnet50_test-2", "another-job")
    assert parse() == (None, None), "its own run had not begun: it starts anew"
    own = copy_run(runs["images"], "runs/resnet50_test-1", "of-another-node", launcher_id())
    assert parse() == (str(own), str(own / "last.pt"))
    delete_checkpoints(own)
    assert parse() == (None, None), "its own run had no checkpoint"


def test_a_restarted_job_with_a_run_folder_of_its_own(runs, restarted):
    assert parse("--out", "mine") == ("mine", None)
    own = copy_run(runs["images"], "mine", launcher_id())
    assert parse("--out", "mine") == ("mine", str(own / "last.pt"))
    delete_checkpoints(own)  # as where the first checkpoint could not be written
    assert parse("--out", "mine") == ("mine", None)
    copy_run(runs["images"], "theirs", "another-job")
    with pytest.raises(InputError, match="already holds a run"):
        parse("--out", "theirs")


def test_a_restarted_job_that_had_resumed_another_run(runs, restarted):
    old = copy_run(runs["images"], "old", "another-job")
    resume = ("--resume", old / "best.pt")
    assert parse(*resume, "--out", "new") == ("new", str(old / "best.pt"))
    new = copy_run(runs["images"], "new", launcher_id())
    assert parse(*resume, "--out", "new") == ("new", str(new / "last.pt"))
    delete_checkpoints(new)
    assert parse(*resume, "--out", "new") == ("new", str(old / "best.pt"))
    assert parse(*resume) == ("old", str(old / "best.pt"))
    config = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps({**config, "launchers": [launcher_id()]}))
    assert parse(*resume) == ("old", str(old / "last.pt"))


def test_a_launcher_is_named_alike_by_its_workers_and_by_no_others(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "faster-training")
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as first, context.Pool(1) as second:
        ours = {pool.apply(launcher_id) for pool in (first, second)}
    assert len(ours) == 1
    assert ours != {launcher_id()}


def test_resume_auto_goes_on_where_out_holds_a_checkpoint_and_starts_where_it_does_not(runs, here):
    with pytest.raises(InputError, match="--resume auto: give --out DIR"):
        parse("--resume", "auto")
    Path("recipe.yaml").write_text("out: mine\nlr: 0.2\n")
    assert parse("--resume", "auto", "--out", "mine") == ("mine", None)
    own = copy_run(runs["images"], "mine", "another-job")
    for where in (["--out", "mine"], ["--recipe", "recipe.yaml"]):
        assert parse("--resume", "auto", *where) == ("mine", str(own / "last.pt"))
    found = Checkpoint(own / "last.pt", {}, progress={"step": 0}, state={})
    with pytest.raises(InputError, match="gone on to step"):  # it has been written since
        check_overwritten("mine", found, again=True)
    delete_checkpoints(own)
    with pytest.raises(InputError, match="already holds a run"):
        parse("--resume", "auto", "--out", "mine")
