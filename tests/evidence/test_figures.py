"""Evidence: the plan's commands, the results page, the recipes' headers, pictures, and the runner.

The runner of the experiments continues where it was stopped.
"""

import contextlib
import dataclasses
import json
import re
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest
import torch
import yaml

import conftest
import errors
import ranks
from backends import machine
from benchmarks import airbench, plain_training, train_peer
from cli import options
from cli.flag_parser import flat as flat_flags
from cli.foreign_names import FOREIGN
from conftest import FILES
from errors import InputError
from figures import draw, experiments, methods, pictures, run_logs

ROOT = ranks.ROOT

PEERS = {"benchmarks.airbench": airbench, "benchmarks.plain_training": plain_training}
PLANS = [experiments.read_plan(experiments.PLAN, name, run_logs.LOGS) for name in ("cpu", "gpu")]
PLANNED = [run for plan in PLANS for run in plan]
MACHINE_FLAGS = {"data_dir", "device", "workers", "out", "resume", "save_every"}


def flags_of(run: experiments.PlannedRun, logs: Path):
    """Parse the flags of a run as its script does; `logs` is an empty folder."""
    folder = logs / run.folder.parent.name / run.folder.name
    arguments = dataclasses.replace(run, folder=folder).arguments()
    for name in PEERS.keys() & set(arguments):  # which are no scripts of ours
        return PEERS[name].parser().parse_args(arguments[arguments.index(name) + 1 :])
    if "benchmarks.train_peer" in arguments:
        return train_peer.parse(arguments[arguments.index("benchmarks.train_peer") + 1 :]).settings
    name = next(argument for argument in arguments if argument in FILES)
    script, arguments = FILES[name], arguments[arguments.index(name) + 1 :]
    return options.parse(script.parser(), script.SCRIPT, arguments)[0]


def with_settings(flags: dict) -> dict:
    """Flags, and settings of parts by names of their own; in some logs they are flags."""
    flat = flat_flags(flags)
    for former, own in FOREIGN.items():
        part, _, key = own.removeprefix("--").partition("=")
        if former[2:] in flat and key.partition("=")[2] in ("", "true") and "=" in key:
            flat[f"{part} {key.partition('=')[0]}"] = flat.pop(former[2:])
    return flat


def test_scripts_accept_the_commands_of_the_plan_whose_flags_its_logs_have(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    finished = [run for run in PLANNED if run_logs.finished(run.folder)]
    assert len(finished) > 50
    for run in [run for run in PLANNED if run.seed == 0 or run in finished]:
        flags = flags_of(run, tmp_path)
        assert str(flags.out).endswith(run.title)
        if run not in finished:
            continue
        planned = with_settings(vars(flags))
        logged = with_settings(run_logs.read_config(run.folder)["flags"])
        common = (planned.keys() & logged.keys()) - MACHINE_FLAGS
        if "optimizer" in planned and "warmup" in planned:  # of our scripts
            known = conftest.parser("texts" if "tokenizer" in planned else "images").flags
            common -= {name for name in known if not known[name].has_effect(planned)}
        is_older = "arch" in logged and "opt_args adamw_ratio" not in logged
        if logged.get("optimizer") == "ngd" and is_older:
            logged["optimizer"] = "kaldi_ngd"  # which had that name then
            common -= {"opt_args rank"}  # 80 was the default once, and no axis is longer than 64
        if "mixup" in logged:
            former = {"intra": "inter_class"}
            logged["mixup"] = former.get(logged["mixup"], logged["mixup"])
        if planned.get("batch_size") == 0:
            common -= {"batch_size"}  # by the rows
        if planned.get("backend") == "auto":
            common -= {"backend"}  # it was eager, which auto is for most runs
        different = [key for key in common if planned[key] != logged[key]]
        assert not different, (run.folder, different)
        trained = run_logs.read_rows(run.folder)[0]["samples"]
        assert not run.rows or 0.9 * run.rows <= trained <= run.rows, run.folder


def test_logs_come_from_clean_commits():
    for path in run_logs.LOGS.glob("*.jsonl"):
        for config in map(run_logs.read_config, run_logs.run_folders(path.with_suffix(""))):
            for segment in [config, *config.get("segments", [])]:
                commit, run = segment.get("commit"), config["run"]
                assert commit, run
                assert not commit.endswith("-dirty"), f"{run}: commit the code, then run it again"
                assert not segment.get("changed"), f"{run}: flags changed while it was trained"


def test_the_results_page_shows_what_the_logs_say():
    page, plan = draw.RESULTS_PAGE.read_text(), yaml.safe_load(experiments.PLAN.read_text())
    groups = run_logs.read_groups(run_logs.LOGS)
    assert draw.page_with_results(page, groups, plan) == page, "run make figures"


MEASURED = re.compile(
    r"(\d+\.\d+)(?: \+- (\d+\.\d+))? %[^()%]*\(figures/logs/(\S+)\.jsonl: (\S+)\)"
)


def test_recipes_say_what_their_logs_show_or_that_they_have_none():
    groups = run_logs.read_groups(run_logs.LOGS)
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        comments = [line.lstrip("# ") for line in path.read_text().splitlines() if line[:1] == "#"]
        header = " ".join(comments)
        reported = MEASURED.findall(header)
        assert reported or "Not run to its end yet" in header, (
            f"{path}: its header lacks 'NN.NN % (figures/logs/GROUP.jsonl: NAME)', or 'Not run to "
            "its end yet'"
        )
        for value, _, group, name in reported:
            values = run_logs.last(groups[group][name], run_logs.accuracy)
            assert float(value) == pytest.approx(statistics.mean(values), abs=0.006), path
            if "transformer_test.py" in header:
                flags = vars(conftest.parsed("texts", f"--recipe {path}"))
                logged = run_logs.read_config(run_logs.LOGS / group / f"{name}-seed0")["flags"]
                both = [with_settings(each)["model_args depth"] for each in (flags, logged)]
                assert both[0] == both[1], path


@pytest.mark.process
def test_every_picture_is_drawn_again_byte_for_byte(tmp_path):
    groups, names = run_logs.read_groups(run_logs.LOGS), set(methods.read_pictures()["pictures"])
    assert names == {path.stem for path in draw.PICTURES.glob("*.png")}
    if f"matplotlib=={matplotlib.__version__} " not in (ROOT / "requirements-lock.txt").read_text():
        pytest.skip("another matplotlib draws other pixels")
    for name in names:
        draw.save(pictures.draw_picture(name, groups), tmp_path / f"{name}.png")
        committed = (draw.PICTURES / f"{name}.png").read_bytes()
        assert (tmp_path / f"{name}.png").read_bytes() == committed, f"{name}: run make figures"


TINY = """
cpu:
  one:
    what: digits
    seeds: [3, 4]
    command: >-
      python resnet50_test.py --dataset digits --arch resnet8 --bs 64 --precision fp32 --warmup 0
    runs:
      short: --epochs 1 --subset 0.1
      long: --epochs {epochs} --subset 0.5
"""


def plan_in(folder: Path, epochs: int = 2) -> list[str]:
    """The runner's arguments for the plan above, which is written into a folder."""
    text = TINY.format(epochs=epochs)
    (folder / "plan.yaml").write_text(text + text.replace("cpu:", "gpu:"))
    places = ["--plan", str(folder / "plan.yaml"), "--logs", str(folder / "logs")]
    return ["cpu", *places, "--allow_dirty"]


def run_plan(folder: Path, *arguments: str, epochs=2, code=0, clock=time.monotonic) -> str:
    """What the runner and its runs print, which are forked processes."""
    words, console = [*plan_in(folder, epochs), *arguments], folder / "console.log"

    def start(words: list[str], cwd: Path, env: dict[str, str]) -> ranks.WarmJob:
        return ranks.WarmJob(words[2:], cwd, env, console=console)

    with pytest.MonkeyPatch.context() as patch, open(console, "w") as printed:
        patch.setattr(experiments.subprocess, "Popen", start)
        patch.setattr(experiments.signal, "signal", lambda *_: None)
        patch.setattr(experiments, "time", SimpleNamespace(monotonic=clock))
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            found = errors.exit_code(lambda: experiments.main(words))
    assert found == code, console.read_text()
    return console.read_text()


def test_wrong_commands_and_uncommitted_code_are_refused(tmp_path, monkeypatch):
    """What is evidence comes from a commit; a log that the runner has written does not stop it."""
    words = plan_in(tmp_path)

    untracked = {tmp_path / "logs": ["new.py"]}  # apart from what is below that folder
    monkeypatch.setattr(experiments.signal, "signal", lambda *_: None)
    monkeypatch.setattr(machine, "modified_files", lambda: ["backends/machine.py"])
    monkeypatch.setattr(machine, "untracked_files", lambda ignored: untracked[ignored])

    cases = [
        (words[:-1], r"not committed: backends/machine\.py, new\.py;"),
        ([*words, "--logs", str(run_logs.LOGS / "below")], "figures/logs are evidence"),
        ([*words, "--only", "two"], "there are one"),
    ]
    if not torch.cuda.is_available():
        cases.append((["gpu", *words[1:]], "gpu: this machine has none"))
    for wrong, match in cases:
        with pytest.raises(InputError, match=match):
            experiments.main(wrong)
    assert not (tmp_path / "logs").exists()


@pytest.mark.process
def test_runs_that_are_done_are_skipped_and_those_that_fail_are_named(tmp_path):
    """All of a seed run before the next; a run without a checkpoint starts again."""
    assert run_plan(tmp_path, "--list").count("open") == 4
    write_log(tmp_path / "logs" / "one" / "short-seed3", "")
    console = run_plan(tmp_path, epochs=0, code=2)
    assert "one/long-seed3 (exit code 2), one/long-seed4 (exit code 2)" in console
    assert run_plan(tmp_path, "--list").count("done") == 2
    started = re.findall(r"\] (\S+): (?!done)", run_plan(tmp_path))
    assert started == ["one/long-seed3", "one/long-seed4"]
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["one.jsonl"]
    assert run_plan(tmp_path).count("done") == 4
    assert run_logs.read_config(tmp_path / "logs" / "one" / "long-seed3")["flags"]["seed"] == 3


@pytest.mark.process
def test_a_plan_that_runs_out_of_time_resumes_from_its_checkpoint(tmp_path):
    folder = tmp_path / "logs" / "one" / "long-seed3"
    before = 0

    def clock() -> float:
        """The time is over when the run has trained a little."""
        there = (folder / "metrics.jsonl").exists() and (folder / "last.pt").exists()
        return 1e9 if there and len(ranks.metrics(folder)) > before else 0.0

    console = run_plan(tmp_path, "--minutes", "1", epochs=4000, code=130, clock=clock)
    assert (folder / "last.pt").exists()
    assert "long-seed4" not in console, "no run starts after the deadline"
    before = len(ranks.metrics(folder))
    console = run_plan(tmp_path, "--minutes", "1", epochs=4000, code=130, clock=clock)
    epochs = [row["epoch"] for row in ranks.metrics(folder)]
    assert epochs == list(range(1, len(epochs) + 1))
    assert len(epochs) > before
    assert "short-seed3: done" in console


def write_log(folder: Path, text: str, **config) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"flags": {"epochs": 1}} | config))
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_a_packed_run_reads_as_its_folder_did(tmp_path):
    """Without the places of a machine; a run that is packed again is replaced."""
    group, row = tmp_path / "one", '{{"epoch": 1,  "seconds": {}}}\n'
    for name, seconds in (("a-seed0", 1.5), ("b-seed1", 2.0), ("a-seed0", 3.0)):
        config = {
            "flags": {"epochs": 1, "data_dir": "/home/me/data", "out": "../../runs/a"},
            "command": ["resnet50_test.py", "--data_dir=/home/me/data", "--lr", "0.1"],
            "launchers": ["a-boot"],
        }
        run_logs.pack(write_log(group / name, row.format(seconds), **config))
    assert not group.exists()
    assert [folder.name for folder in run_logs.run_folders(group)] == ["a-seed0", "b-seed1"]
    assert run_logs.row_lines(group / "a-seed0") == ['{"epoch": 1,  "seconds": 3.0}']
    assert run_logs.read_config(group / "a-seed0") == {
        "run": "a-seed0",
        "flags": {"epochs": 1, "data_dir": "data", "out": "a"},
        "command": ["resnet50_test.py", "--data_dir=data", "--lr", "0.1"],
    }
    for seed, text in enumerate(('{"epoch": 2}\n', '{"epoch": 1}\n{"epo', "")):  # unfinished
        write_log(tmp_path / "two" / f"c-seed{seed}", text, flags={"epochs": 3})
    row = '{"epoch": 1, "test_accuracy": 0.9}\n'
    write_log(tmp_path / "two" / "ended-seed0", row, flags={"epochs": 3, "stop_at": 0.9})
    groups = run_logs.read_groups(tmp_path)
    assert groups["one"]["b"] == [[{"epoch": 1, "seconds": 2.0}]]
    assert groups["two"].keys() == {"ended"}
    with pytest.raises(InputError, match="no folder of a finished run"):
        run_logs.pack(group / "a-seed0")
