"""What config.json says of the commit, and where it cannot be told."""

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


def commit(folder: Path, *names: str) -> None:
    """Make a folder a repository, whose one commit has these files."""
    git(folder, "init", "-q")
    git(folder, "add", *names)
    git(folder, "commit", "-q", "-m", "all")


def test_changed_code_makes_a_commit_dirty_and_changed_results_do_not(project, monkeypatch):
    commit(project, ".")
    monkeypatch.setenv("COMMIT", "another")
    known = git(project, "describe", "--always").strip()
    (project / "figures" / "time.png").write_text("drawn again")
    (project / "figures" / "logs" / "group").mkdir(parents=True)
    (project / "figures" / "logs" / "group" / "metrics.jsonl").write_text("{}")
    assert (machine.commit_or_none(), machine.modified_files()) == (known, [])
    assert machine.untracked_files(ignored=project) == []
    (project / "ngd.py").write_text("second")
    assert machine.commit_or_none() == f"{known}-dirty"
    git(project, "add", "ngd.py")
    assert machine.modified_files() == ["ngd.py"], "staged is not committed"
    for name in ("new method.py", "my_logs/config.json"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("")
    assert machine.untracked_files(ignored=project / "my_logs") == ["new method.py"]
    assert len(machine.untracked_files(ignored=Path("elsewhere"))) == 2


def test_a_copy_does_not_get_the_commit_of_a_folder_above_but_what_it_is_told(project, monkeypatch):
    (project.parent / "other").write_text("")
    commit(project.parent, "other")
    assert machine.commit_or_none() is None
    with pytest.raises(machine.CommitUnknown, match="git ls-files: .*machine.py"):
        machine.modified_files()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(project.parent))
    monkeypatch.setenv("COMMIT", "abcdef0-dirty")
    assert machine.commit_or_none() == "abcdef0-dirty"
    with pytest.raises(machine.CommitUnknown, match="not a git repository"):
        machine.modified_files()
