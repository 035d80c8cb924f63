"""A process that has lost another one ends in time, with one line and exit code 1."""

import atexit
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import errors
import ranks
from conftest import each_of, write_images
from distributed import world
from distributed.world import lost_peer_reason
from training import checkpoint

JOB = """
import os, signal, sys, time
import pytest
import torch
import torch.distributed as dist
import errors
from distributed import waiting
from distributed.agreement import local_main_first
from distributed.world import TimeLimits, init_world

start_limit = float(sys.argv[2])
errors.LOST_PEER_SECONDS, waiting.FIRST_SECONDS, waiting.AGAIN_SECONDS = 0.0, start_limit / 3, 0.5

def main():
    with init_world("cpu", TimeLimits(start=start_limit, step=4)) as world:
        group = dist.new_group()  # as an optimizer makes it
        with local_main_first(world):
            pass
        dist.all_reduce(torch.ones(3), group=group)
        world.first_step_done()
        waiting.FIRST_SECONDS = 1.0
        if world.rank == 1:
            end(sys.argv[1])
        world.sum(torch.ones(3))

def end(how):
    if how == "sleep":
        time.sleep(60)
    if how == "error":
        raise errors.InputError("a broken image")
    os.kill(os.getpid(), getattr(signal, how))

sys.exit(errors.exit_code(main))
"""


@each_of(
    ("how", "reason"),
    [
        ("SIGSTOP", "no answer for 4 s"),
        ("sleep", "no answer for 4 s"),
        ("SIGKILL", ""),
        ("error", ""),
    ],
)
def test_a_rank_names_the_one_it_waits_for_and_ends_where_it_is_lost(how, reason, tmp_path):
    folder = tmp_path / how
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    job = ranks.start(ranks.torchrun(str(folder / "job.py"), how, "120"), folder, NGPU="2")
    first = job.processes[0]
    connection.wait([first.sentinel], timeout=240)
    ranks.kill(job)
    lines = (folder / "console.log").read_text().splitlines()
    own = [line for line in lines if "broken image" not in line]
    assert first.exitcode == 1
    waits = ["rank 0 waits up to 4 s for ranks [1] of 2"] if reason else []
    assert own[:-1] == waits
    assert own[-1].startswith(f"error: rank 0 has lost another process ({reason}")
    assert "--resume" in own[-1]


def test_a_rank_whose_peer_never_starts_ends_in_time(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    with ranks.rank_environments(2) as (environment, _):
        environment["TORCHELASTIC_RESTART_COUNT"] = "1"
        command = ranks.script(str(tmp_path / "job.py"), "error", "3")
        job = ranks.start(command, tmp_path, **environment)
        console = ranks.finish(job, tmp_path, expected=1)
    what = "ranks [1] of 2 have not come"
    expected = [
        f"waiting up to 3 s (--timeout): {what}",
        f"error: no answer for 3 s (--timeout): {what}",
    ]
    assert console.splitlines() == expected


def test_ranks_meet_those_that_live_and_have_the_same_device(monkeypatch):
    monkeypatch.setattr(world, "RESTART_SECONDS", 0.2)
    both, dead = [world.World(rank=rank, size=2) for rank in (0, 1)], "cpu 3 /file the-dead host"
    with ThreadPoolExecutor(2) as pool:
        for device in ("cpu", "cuda"):
            store = dist.HashStore()
            store.set_timeout(timedelta(seconds=120))
            store.set("arrived/1", dead)
            first = pool.submit(world._meet, store, both[0], "cpu", {0, 1})
            store.get(f"seen/{dead}")
            time.sleep(0.5)  # in which the dead one does not answer
            second = pool.submit(world._meet, store, both[1], device, {0})
            if device == "cpu":
                first.result().set("key", "value")
                assert second.result().get("key") == b"value"
    for each in (first, second):
        with pytest.raises(errors.InputError, match="have a GPU, and others none"):
            each.result()


def test_nodes_are_found_wherever_their_ranks_are_and_whatever_a_process_number_means():
    with open(os.memfd_create("token")) as file:
        own = f"/proc/self/fd/{file.fileno()}"
        seen = ("other", "a"), ("token", "a"), ("token", "b"), ("token", "a"), ("token", "b")
        everyone = [world._Arrival("cpu", "3", own, token, host) for token, host in seen]
        with ThreadPoolExecutor(5) as pool:
            find = partial(world._find_nodes, dist.HashStore(), everyone)
            assert list(pool.map(find, range(5))) == [[[0], [1, 3], [2, 4]]] * 5


def test_only_a_lost_connection_is_told_as_one():
    for message, reason in (
        ("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:4", "Connection"),
        ("[gloo/unbound_buffer.cc:78] Timed out waiting 2000ms for recv", "no answer for 2 s"),
        ("The size of tensor a (3) must match the size of tensor b (4)", ""),
        ("[Utils.hpp:790] Broken pipe. Check it\nframe #0: start (libc.so)", "Broken pipe"),
        ("NCCL error in:\nncclRemoteError: remote process exited\nLast error:\nio", "ncclRemote"),
    ):
        found = lost_peer_reason(RuntimeError(message), 2.0)
        assert found.startswith(reason)
        assert bool(found) == bool(reason)
        assert "\n" not in found
        assert "Check" not in found


def test_over_nccl_an_error_is_printed_before_the_group_is_given_up(monkeypatch):
    events = []
    monkeypatch.setattr(world, "choose_device", lambda *_: torch.device("cuda:0"))
    monkeypatch.setattr(world, "_init_process_group", lambda *_: None)
    monkeypatch.setattr(world, "_meet_at_first", lambda *_: 0)
    monkeypatch.setattr(world, "end_with_launcher", lambda: None)
    monkeypatch.setattr(world, "abort_process_groups", lambda: events.append("aborted"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: events.append("destroyed"))
    monkeypatch.setattr(atexit, "register", lambda function: events.append(function))
    monkeypatch.setattr("builtins.print", lambda *_, **__: events.append("printed"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def fail() -> None:
        with world.init_world("cpu"):
            raise errors.InputError("a broken image")

    assert errors.exit_code(fail) == 2
    at_exit, printed = events
    assert printed == "printed"
    at_exit()
    assert events[-1] == "aborted"
    with world.init_world("cpu"):
        events.clear()
    assert events == ["destroyed"]


def test_a_broken_file_of_the_test_set_costs_no_epoch(tmp_path):
    broken = write_images(tmp_path / "mine", "ab", rows=12, size=12) / "test" / "b" / "11.png"
    os.truncate(broken, 150)
    flags = "--dataset folder --data_dir mine --resident no --arch resnet8 --bs 4 --out run"
    words = f"resnet50_test.py {flags} --epochs 1 --threads 1 --workers 0 --no-baseline"
    console = ranks.run(words, tmp_path, 2, expected=2)
    assert console.splitlines()[-1].startswith("error: mine/test/b/11.png: not a readable image")
    assert checkpoint.load(tmp_path / "run").progress["step"] == 3


@each_of(
    ("error", "line"),
    [
        (MemoryError(), "this machine's memory is too small"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), "memory is too small"),
        (RuntimeError("unable to allocate shared memory(shm) for file"), "/dev/shm, through which"),
        (RuntimeError("DataLoader worker (pid 9) is killed by signal: Killed."), "memory runs out"),
    ],
)
def test_too_little_memory_is_one_line(error, line, capsys):
    assert errors.exit_code(mock.Mock(side_effect=error)) == 2
    assert line in capsys.readouterr().err


def interrupt_imports() -> None:
    del sys.modules["dynamic_batch"]
    finder = mock.Mock(find_spec=lambda *_: os.kill(os.getpid(), signal.SIGINT))
    sys.meta_path.insert(0, finder)


def test_a_signal_while_torch_is_imported_is_one_line(tmp_path):
    job = ranks.start(ranks.script("resnet50_test.py"), tmp_path, first=interrupt_imports)
    console = ranks.finish(job, tmp_path, expected=130)
    assert console == "error: interrupted by SIGINT\n"


def test_a_signal_to_one_rank_writes_a_checkpoint_and_all_leave_with_130(tmp_path):
    words = "--dataset digits --arch resnet8 --subset 0.2 --bs 16 --epochs 500 --threads 1".split()
    command = ranks.torchrun("resnet50_test.py", *words, "--out", "run")
    job, log = ranks.start(command, tmp_path, NGPU="2"), tmp_path / "run" / "metrics.jsonl"
    ranks.wait_for(lambda: log.exists() and "\n" in log.read_text(), job)
    os.kill(job.processes[-1].pid, signal.SIGINT)
    console = ranks.finish(job, tmp_path, expected=130)
    assert "last.pt is written, resume run to go on" in console.splitlines()[-1]
    assert "Traceback" not in console
