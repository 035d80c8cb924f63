"""Compare the runs of two checkouts: every row of metrics.jsonl, key by key, but for the clock.

    git worktree add /tmp/before 509482f
    python tests/golden_runs.py /tmp/before .            # all runs, both sides at the same time
    python tests/golden_runs.py /tmp/before . --only ngd --keep /tmp/golden

Each command names its optimizer, rate, schedule and threads, so that a changed default changes no
run. Keys that one side alone has are printed and are no difference. Exit code 1 if a run differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TIMING = {
    "seconds",
    "train_seconds",
    "compile_seconds",
    "eval_seconds",
    "samples_per_second",
    "worker_samples_per_second",
    "peak_memory_bytes",
}
IMAGES = (
    "resnet50_test.py --dataset digits --arch resnet8 --bs 64 --epochs 3 --lr_schedule cosine "
    "--warmup 1 --threads 1 --workers 0 --device cpu --precision fp32 --seed 3"
)
TEXTS = (
    "transformer_test.py --dataset headlines --width 32 --depth 1 --heads 2 --mlp_width 64 "
    "--vocab_size 800 --bs 32 --epochs 3 --lr_schedule cosine --warmup 1 --threads 1 --device cpu "
    "--precision fp32 --seed 3 --prior none"
)
SGD = "--optimizer sgd --lr 0.1 --momentum 0.9"
RUNS = {  # name: (processes, whether it is killed once and resumed, command)
    "sgd": (1, True, f"{IMAGES} {SGD} --nesterov"),
    "adamw": (1, False, f"{IMAGES} --optimizer adamw --lr 3e-3"),
    "ngd": (1, True, f"{IMAGES} --optimizer ngd --lr 0.05"),
    "ngd-2": (2, False, f"{IMAGES} --optimizer ngd --lr 0.05"),
    "kaldi_ngd": (1, False, f"{IMAGES} --optimizer kaldi_ngd --lr 0.05"),
    "muon": (1, False, f"{IMAGES} --optimizer muon --lr 0.02"),
    "lars": (1, False, f"{IMAGES} --optimizer lars --lr 1"),
    "lamb": (1, False, f"{IMAGES} --optimizer lamb --lr 0.01"),
    "slamb": (1, False, f"{IMAGES} --optimizer slamb --lr 0.01 --local_steps 7"),
    "slamb-2": (2, True, f"{IMAGES} --optimizer slamb --lr 0.01 --local_steps 7"),
    "slamb-int4-2": (2, False, f"{IMAGES} --optimizer slamb --lr 0.01 --wire_dtype int4"),
    "demo": (1, False, f"{IMAGES} --optimizer demo --lr 0.003"),
    "demo-2": (2, False, f"{IMAGES} --optimizer demo --lr 0.003"),
    "diloco-2": (2, True, f"{IMAGES} {SGD} --sync diloco --local_steps 7"),
    "local-2": (2, False, f"{IMAGES} {SGD} --sync local --local_steps 7"),
    "lag-2": (2, False, f"{IMAGES} {SGD} --sync lag"),
    "int4-2": (2, False, f"{IMAGES} {SGD} --grad_compress int4"),
    "powersgd-2": (2, False, f"{IMAGES} {SGD} --grad_compress powersgd"),
    "mixup": (1, False, f"{IMAGES} {SGD} --mixup mixup --alpha 0.4"),
    "meta": (1, True, f"{IMAGES} {SGD} --mixup meta --meta_every 4 --val_fraction 0.1"),
    "ngd-meta": (1, False, f"{IMAGES} --ngd --lr 0.05 --meta_learning --meta_every 4"),
    "cutmix": (1, False, f"{IMAGES} {SGD} --mixup cutmix --alpha 1"),
    "batch-scheduled": (
        1,
        False,
        f"{IMAGES} {SGD} --dynamic_batch increase --batch_milestones 1 2 --batch_factor 2",
    ),
    "batch-loss": (1, False, f"{IMAGES} {SGD} --dynamic_batch loss"),
    "batch-noise": (1, True, f"{IMAGES} {SGD} --bs 32 --dynamic_batch noise --max_bs 256"),
    "noise-scale": (1, False, f"{IMAGES} {SGD} --noise_scale"),
    "ema": (1, False, f"{IMAGES} {SGD} --ema 0.9"),
    "fuse": (1, False, f"{IMAGES} {SGD} --fuse"),
    "micro-batches": (1, False, f"{IMAGES} {SGD} --micro_bs 16 --accumulate 2"),
    "small-images": (1, False, f"{IMAGES} {SGD} --image_size 16 --small_epochs 2 --small_size 8"),
    "bf16": (1, False, f"{IMAGES} {SGD} --precision bf16"),
    "texts": (1, False, f"{TEXTS} --optimizer adamw --lr 2e-3"),
    "texts-ngd": (1, False, f"{TEXTS} --optimizer ngd --lr 0.05 --label_smoothing 0.1"),
    "tokens": (1, False, f"{TEXTS} --optimizer adamw --lr 2e-3 --mixup mixup --mix_at tokens"),
    "texts-meta": (
        1,
        False,
        f"{TEXTS} --optimizer adamw --lr 2e-3 --mixup meta --meta_policy beta --meta_every 4",
    ),
    "prior": (1, False, f"{TEXTS} --optimizer adamw --lr 2e-3 --prior naive_bayes"),
    "bpe-2": (2, False, f"{TEXTS} --optimizer adamw --lr 2e-3 --tokenizer bpe"),
    "cifar10": (
        1,
        False,
        "resnet50_test.py --dataset cifar10 --arch resnet20 --subset 0.02 --bs 64 --epochs 1 "
        "--optimizer ngd --lr 0.05 --lr_schedule cosine --warmup 0 --threads 1 --device cpu "
        "--precision fp32 --image_size 24",
    ),
    "agnews": (
        1,
        False,
        "transformer_test.py --dataset agnews --subset 0.1 --width 32 --depth 1 --heads 2 "
        "--mlp_width 64 --bs 64 --epochs 1 --optimizer adamw --lr 2e-3 --lr_schedule cosine "
        "--warmup 0 --threads 1 --device cpu --precision fp32",
    ),
}


def run(checkout: Path, name: str, folder: Path) -> list[dict[str, object]]:
    """Run one command of a checkout and return the rows of its metrics.jsonl.

    Raises:
        RuntimeError: the command failed; the message has the end of its console.
    """
    processes, is_killed, words = RUNS[name]
    folder.mkdir(parents=True)
    command = [sys.executable, *words.split()]
    if processes > 1:
        command = ["bash", "run_distributed.sh", *words.split()]
    command += ["--out", str(folder / "run"), "--save_every", "5"]
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "NGPU": str(processes),
        "OMP_NUM_THREADS": "1",
    }
    with open(folder / "console.log", "w", encoding="utf-8") as console:

        def start(*more: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [*command, *more],
                cwd=checkout,
                env=environment,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )

        job = start()
        if is_killed:
            while job.poll() is None and not (folder / "run" / "last.pt").exists():
                time.sleep(0.02)
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
                time.sleep(1 if processes > 1 else 0)  # ranks end after their launcher
                job = start("--resume", str(folder / "run"))
        code = job.wait()
    if code:
        raise RuntimeError((folder / "console.log").read_text(encoding="utf-8")[-1500:])
    text = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def differences(before: list[dict[str, object]], after: list[dict[str, object]]) -> list[str]:
    """Return a line for each value in which the rows of two runs differ."""
    if len(before) != len(after):
        return [f"{len(before)} and {len(after)} epochs"]
    return [
        f"epoch {number}, {key}: {old[key]!r} and {new[key]!r}"
        for number, (old, new) in enumerate(zip(before, after), 1)
        for key in old.keys() & new.keys() - TIMING
        if json.dumps(old[key]) != json.dumps(new[key])
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    args = parser.parse_args()
    root = args.keep or Path(tempfile.mkdtemp(prefix="golden-"))
    num_different = 0
    with ThreadPoolExecutor(2) as pool:
        for name in args.only:
            sides = {"before": args.before.resolve(), "after": args.after.resolve()}
            jobs = {
                side: pool.submit(run, checkout, name, root / name / side)
                for side, checkout in sides.items()
            }
            try:
                before, after = (job.result() for job in jobs.values())
            except RuntimeError as error:
                found = [f"failed: {error}"]
            else:
                found = differences(before, after)
                own = set().union(*before) ^ set().union(*after)
                note = f" (keys of one side: {', '.join(sorted(own))})" if own else ""
            num_different += bool(found)
            print(f"{name}: {'DIFFERS' if found else 'equal' + note}", flush=True)
            for line in found[:6]:
                print(f"    {line}")
    print(f"{len(args.only) - num_different} of {len(args.only)} runs are equal")
    if not args.keep:
        shutil.rmtree(root)
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
