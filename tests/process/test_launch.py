"""Real processes, as a user starts them: kills, signals, restarts, nodes, torchrun's exit codes."""

import functools
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
from unittest import mock

import pytest
import torch

import ranks
from conftest import each_of, write_images
from distributed.launch import launch

RUN = """resnet50_test.py --dataset digits --arch resnet8 --subset 0.2 --lr 0.05 --mixup cutmix
    --epochs 12 --save_every 4 --threads 1 --precision fp32 --seed 3 --out run --resume auto"""


def command(size: int) -> str:
    """The command of a run whose global batch is the same on any number of ranks."""
    return f"{RUN} --bs {32 // size}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory):
    """The uninterrupted run on so many ranks."""

    @functools.cache
    def finish(size: int):
        folder = tmp_path_factory.mktemp("whole")
        ranks.run(f"{command(size)} --keep 1", folder, size)
        return folder / "run"

    return finish


def wait_for_a_row(folder, job: subprocess.Popen[str]) -> None:
    """Until an epoch is done, of which there are eleven more."""
    log = folder / "run" / "metrics.jsonl"
    ranks.wait_for(lambda: log.exists() and "\n" in log.read_text(), job)
    assert job.poll() is None, (folder / "console.log").read_text()


def kill_rank(job: subprocess.Popen[str], rank: int) -> None:
    mark = f"\0RANK={rank}\0".encode()
    [number] = [number for number, environment in ranks.relatives(job) if mark in environment]
    os.kill(number, signal.SIGKILL)


# -------------------------------------------------------------------- kills and signals


def has_namespaces() -> bool:
    probe = "unshare --net --uts --mount ip link add one type veth peer name two".split()
    return bool(shutil.which("unshare")) and not subprocess.run(probe, check=False).returncode


def test_two_ranks_end_with_a_killed_launcher_and_go_on_bit_for_bit(whole, tmp_path):
    words = ranks.torchrun(*command(2).split())
    if has_namespaces():  # nobody knows this host's own name
        alone = 'hostname nowhere; ip link set lo up; exec "$@"'
        words = ["unshare", "--net", "--uts", "sh", "-c", alone, "sh", *words]
    job = ranks.start(words, tmp_path, cold=True, NGPU="2")  # whose number is the launcher's
    wait_for_a_row(tmp_path, job)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    ranks.wait_for(lambda: not ranks.relatives(job), mock.Mock(poll=lambda: None))
    assert len(ranks.metrics(tmp_path / "run")) < 12, "it was not trained to its end"
    ranks.run(command(2), tmp_path, 2)
    ranks.same_run(whole(2), tmp_path / "run")


def test_four_ranks_restart_once_and_end_with_one_of_them_and_go_on_bit_for_bit(whole, tmp_path):
    with socket.socket() as taken:  # of the port that the job was to have
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        variables = {"NGPU": "4", "MAX_RESTARTS": "1", "MASTER_PORT": str(taken.getsockname()[1])}
        job = ranks.start(ranks.torchrun(*command(4).split()), tmp_path, **variables)
        wait_for_a_row(tmp_path, job)
    kill_rank(job, 2)
    console = tmp_path / "console.log"
    ranks.wait_for(lambda: console.read_text().count("training samples") == 2, job)
    kill_rank(job, 2)
    lines = ranks.finish(job, tmp_path, expected=128 + signal.SIGKILL).splitlines()
    [restart] = [line for line in lines if line.startswith("restart")]
    rows = len(ranks.metrics(tmp_path / "run"))
    assert re.fullmatch(r"restart 1 of 1, from epoch \d+", restart)
    assert 2 <= int(restart.split()[-1]) <= rows + 1
    assert "error: process 2 was ended by signal 9" in lines
    assert "Traceback" not in "".join(lines)
    assert not ranks.relatives(job)
    ranks.run(command(4), tmp_path, 4)
    ranks.same_run(whole(4), tmp_path / "run")


def test_a_signal_to_the_whole_job_spares_the_processes_that_decode_images(tmp_path):
    """systemd and Slurm send it to every process of a job, and a terminal its Ctrl-C."""
    write_images(tmp_path / "mine", ("cat", "dog"), rows=30, size=64)
    flags = "--dataset folder --data_dir mine --resident no --arch resnet8 --bs 8 --out run"
    flags = f"{flags} --epochs 500 --threads 2 --workers 1".split()
    command = ["setsid", *ranks.script("resnet50_test.py", *flags)]
    job = ranks.start(command, tmp_path, OMP_NUM_THREADS="2")  # libraries start threads at a fork
    wait_for_a_row(tmp_path, job)
    os.killpg(job.pid, signal.SIGTERM)
    console = ranks.finish(job, tmp_path, expected=130)
    assert "last.pt is written" in console.splitlines()[-1]
    assert "Traceback" not in console
    assert not ranks.relatives(job)


# -------------------------------------------------------------------- several nodes

HOSTS = r"""
links=$1
shift
node() { # node NUMBER NAME MASTER COMMAND...: a host whose own name is at 127.0.1.1
    local number=$1 name=$2 master=$3
    shift 3
    mkdir "$name"
    printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$name" > "$name/hosts"
    NODE_RANK=$number MASTER_ADDR=$master name=$name link=$links$number \
        unshare --net --uts --mount sh -ec 'hostname "$name"
                mount --bind "$name/hosts" /etc/hosts
                ip link set lo up
                until ip link set "$link" up 2> /dev/null; do sleep 0.05; done
                ip addr add "192.168.77.1$NODE_RANK/24" dev "$link"
                exec "$@" > "$name/console.log" 2>&1' sh "$@" &
    until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
    ip link set "$links$number" netns $!
}
ip link add "${links}0" type veth peer name "${links}1"
node 0 zeta zeta "$@"
first=$!
node 1 alpha 192.168.77.10 "$@"
wait $!
wait $first
"""


def test_two_hosts_whose_own_name_is_a_loopback_address_train_and_restart(whole, tmp_path):
    """Node 0 has its name, node 1 its address. By the alphabet node 1 would be the first."""
    if not has_namespaces():
        pytest.skip("network namespaces are not allowed here")
    torchrun = ranks.torchrun(*command(2).split())
    words = ["bash", "-ec", HOSTS, "hosts", f"v{os.getpid()}-", *torchrun]
    variables = {"NNODES": "2", "NGPU": "1", "MAX_RESTARTS": "1", "MASTER_PORT": "29411"}
    job = ranks.start(words, tmp_path, cold=True, **variables)
    wait_for_a_row(tmp_path, job)
    kill_rank(job, 1)
    ranks.finish(job, tmp_path)
    first, second = (
        (tmp_path / name / "console.log").read_text().splitlines() for name in ("zeta", "alpha")
    )
    [lost] = [line for line in first if line.startswith("error:")]
    assert re.match(r"error: rank 0 has lost another process \(.*\[192\.168\.77\.11\]", lost), lost
    assert any(line.startswith("restart 1 of 1, from epoch ") for line in first)
    assert "run folder run" in first[-1]
    assert all(line.startswith("waiting up to") for line in second)
    rows = [{**row, "devices": 2} for row in ranks.metrics(whole(2))]  # on CPUs that is nodes
    assert ranks.metrics(tmp_path / "run") == rows
    weights = (ranks.weights(folder).values() for folder in (whole(2), tmp_path / "run"))
    assert all(itertools.starmap(torch.equal, zip(*weights, strict=True)))


SLURM = {  # programs by name; python takes the place of the interpreter
    "scontrol": """[ "$2" = hostnames ] && printf 'n7\\nn8\\n' || echo "Id=7 Command=$FILE A=1" """,
    "srun": """shift 2; for i in 0 1; do SLURM_NODEID=$i "$@"; done""",
    "python": """[ "$1" = -c ] && echo 4 || echo "$SRUN_CPUS_PER_TASK $*" """,
}


def test_a_slurm_job_hands_on_its_cores_and_goes_on_with_its_run_from_any_folder(tmp_path):
    for name, line in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    spooled = shutil.copy(ranks.ROOT / "run_slurm.sh", tmp_path / "slurm_script")
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "python"),
        "FILE": str(ranks.ROOT / "run_slurm.sh"),
        "NGPU": "4",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_CPUS_PER_TASK": "8",
    }
    given = "--bs 256 --out mine", "--bs 256 --resume runs/a --out runs/b", "--bs 8"
    jobs = [f'bash "$0" resnet50_test.py {flags}' for flags in given]
    (tmp_path / "runs" / "b").mkdir(parents=True)
    (tmp_path / "runs" / "b" / "last.pt").touch()
    words = ["bash", "-c", "; ".join([*jobs, f"SLURM_RESTART_COUNT=1 {jobs[1]}"]), str(spooled)]
    console = ranks.finish(ranks.start(words, tmp_path, cold=True, **variables), tmp_path)
    out, auto = "--out runs/resnet50_test-77", "--resume auto"
    given = [f"{out} {auto} {given[0]}", given[1], f"{out} {given[2]}", f"{given[1]} {auto}"]
    expected = itertools.product(given, (0, 1))
    for (flags, rank), line in zip(expected, console.splitlines(), strict=True):
        assert line == (
            f"8 {ranks.ROOT}/distributed/launch.py --nnodes 2 --node_rank {rank} --master_addr n7 "
            "--master_port 20077 --nproc_per_node 4 --max_restarts 0 "
            f"{ranks.ROOT}/resnet50_test.py {flags}"
        )


# -------------------------------------------------------------------- torchrun


def exit_with(words: list[str], console) -> None:
    """Become a launcher with these words, to whom nothing happens when a terminal is closed."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with open(console, "a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os._exit(launch(["--standalone", *words]))


STOPPED = """trap 'echo stopped; exit' TERM
touch ready-$RANK
[ "$RANK" = 1 ] || { until [ -e ready-1 ]; do sleep 0.1; done; kill -QUIT $PPID; }
while :; do sleep 0.1; done"""


@each_of(
    ("script", "code"),
    [
        ("exit 0", 0),
        ('[ "$RANK" = 0 ] && exec sleep 60; kill -HUP $$$$ $PPID; sleep 1; exit 3', 3),
        ('[ "$RANK" = 0 ] && exec sleep 60; kill -9 $$$$', 137),  # torchrun halves each $$
        (STOPPED, 130),
    ],
)
def test_the_launcher_returns_the_code_of_the_rank_that_failed_first(script, code, tmp_path):
    words = ["--nproc_per_node=2", "--no_python", "sh", "-c", f"cd {tmp_path}; {script}"]
    process = ranks.FORKSERVER.Process(target=exit_with, args=(words, tmp_path / f"{code}.log"))
    process.start()
    process.join(240)
    assert process.exitcode == code
    lines = (tmp_path / f"{code}.log").read_text().splitlines()
    expected = {137: ["error: process 1 was ended by signal 9"], 130: ["stopped"] * 2}
    assert [line for line in lines if line != "Terminated"] == expected.get(code, [])
