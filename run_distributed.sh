#!/usr/bin/env bash
# Train on all GPUs of a node, or of several nodes, through torchrun.
#
#   bash run_distributed.sh                                         both scripts, default sizes
#   NGPU=4 bash run_distributed.sh resnet50_test.py --bs 256        one script, its flags forwarded
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 bash run_distributed.sh resnet50_test.py ...    the same on every node
#
# Environment: NGPU (processes a node; default: its GPUs, else 2), NNODES (1), NODE_RANK (0), MASTER_ADDR (needed for
# several nodes), MASTER_PORT (29400, of several nodes only), MAX_RESTARTS (0; a restarted job resumes by itself),
# PYTHON (.venv/bin/python where it is, else python3). The exit code is the script's own.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

python=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
if ! gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null); then
    echo "error: $python has no torch: pip install -r requirements.txt, or run bash demo.sh once, which makes .venv" >&2
    exit 2
fi
processes=${NGPU:-$((gpus > 0 ? gpus : 2))}
cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)))')
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}

if [ "${NNODES:-1}" -gt 1 ]; then
    : "${MASTER_ADDR:?MASTER_ADDR must name the first node}"
    rendezvous=(--nnodes "$NNODES" --node_rank "${NODE_RANK:-0}" --rdzv_backend c10d --rdzv_id "${JOB_ID:-faster-training}"
        --rdzv_endpoint "$MASTER_ADDR:${MASTER_PORT:-29400}")
else
    rendezvous=(--standalone) # a free port of the system's choice
fi

launch() { # launch SCRIPT FLAG...: distributed.launch is torchrun with the scripts' exit codes
    local script=$1
    shift
    [ -f "$script" ] || script=$root/$script
    ${exec:-} "$python" -m distributed.launch "${rendezvous[@]}" --nproc_per_node "$processes" \
        --max_restarts "${MAX_RESTARTS:-0}" "$script" "$@"
}

if [ "$#" -gt 0 ]; then
    exec="exec" launch "$@" # signals reach the launcher, not this shell
elif [ "$gpus" -gt 0 ]; then
    launch resnet50_test.py
    launch transformer_test.py
else
    echo "no GPU: $processes gloo processes, small embedded data sets and models, so that a CPU can finish"
    launch resnet50_test.py --dataset digits --arch resnet20 --bs 32 --lr 0.1 --epochs 3
    launch transformer_test.py --dataset headlines --bs 8 --lr 4e-4 --epochs 10
fi
