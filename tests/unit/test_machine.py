"""What config.json says of the commit, and where it cannot be told."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from backends import machine


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.check_output(["git", *author, *arguments], cwd=folder, text=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `machine` believes to lie, with a method and a picture."""
    monkeypatch.delenv("COMMIT", raising=False)
    folder = tmp_path / "project"
    for name in ("backends/machine.py", "figures/time.png", "ngd.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("first")
    monkeypatch.setattr(machine, "ROOT", folder)
    monkeypatch.setattr(machine, "__file__", str(folder / "backends" / "machine.py"))
    return folder


@pytest.fixture
def clone(project: Path) -> Path:
    """The same as a repository of one commit."""
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "all")
    return project


def test_changed_code_makes_a_commit_dirty_and_changed_results_do_not(clone, monkeypatch):
    monkeypatch.setenv("COMMIT", "another")
    commit = git(clone, "describe", "--always").strip()
    (clone / "figures" / "time.png").write_text("drawn again")
    (clone / "figures" / "logs" / "group").mkdir(parents=True)
    (clone / "figures" / "logs" / "group" / "metrics.jsonl").write_text("{}")
    assert (machine.commit_or_none(), machine.modified_files()) == (commit, [])
    assert machine.untracked_files(ignored=clone) == []
    (clone / "ngd.py").write_text("second")
    assert machine.commit_or_none() == f"{commit}-dirty"
    git(clone, "add", "ngd.py")
    assert machine.modified_files() == ["ngd.py"], "staged is not committed"
    (clone / "ngd.py").unlink()
    assert machine.modified_files() == ["ngd.py"]
    for name in ("new method.py", "my_logs/config.json"):
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).write_text("")
    assert machine.untracked_files(ignored=clone / "my_logs") == ["new method.py"]
    assert len(machine.untracked_files(ignored=Path("elsewhere"))) == 2


def test_a_copy_does_not_get_the_commit_of_a_folder_above_but_what_it_is_told(project, monkeypatch):
    (project.parent / "other").write_text("")
    git(project.parent, "init", "-q")
    git(project.parent, "add", "other")
    git(project.parent, "commit", "-q", "-m", "other")
    assert machine.commit_or_none() is None
    with pytest.raises(machine.CommitUnknown, match="git ls-files: .*machine.py"):
        machine.modified_files()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(project.parent))
    monkeypatch.setenv("COMMIT", "abcdef0-dirty")
    assert machine.commit_or_none() == "abcdef0-dirty"
    with pytest.raises(machine.CommitUnknown, match="not a git repository"):
        machine.modified_files()
