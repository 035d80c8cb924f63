#!/usr/bin/env bash
# Train on all GPUs of a node, or of several nodes, through torchrun.
#
#   bash run_distributed.sh                                         both scripts, default sizes
#   NGPU=4 bash run_distributed.sh resnet50_test.py --bs 256        one script, its flags forwarded
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 bash run_distributed.sh resnet50_test.py ...
#                                                                   the same on every node
#
# Environment variables and their defaults:
#   NGPU           processes of a node (its GPUs, else 2)
#   NNODES         nodes (1)
#   NODE_RANK      number of this node (0); the run folder is made on node 0
#   MASTER_ADDR    name or address of node 0; needed for several nodes
#   MASTER_PORT    port on it, for several nodes only (29400); jobs that run at the same time on the
#                  same first node need a port each
#   MAX_RESTARTS   restarts after a failure; a restarted job goes on with its own run by itself (0)
#   PYTHON         interpreter (.venv/bin/python where it exists, else python3)
# The exit code is that of the script.
set -euo pipefail
unset CDPATH # with it, cd prints
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
    echo "error: $*" >&2
    exit 2
}

venv=$root/.venv/bin/python
python=${PYTHON:-$([ -x "$venv" ] && echo "$venv" || echo python3)}
# To count the GPUs takes seconds, which are saved where the answer is not needed.
count='import torch; print(torch.cuda.device_count())'
if [ -n "${NGPU:-}" ] && [ "$#" -gt 0 ]; then
    count='import importlib.metadata as metadata; metadata.version("torch"); print(0)'
fi
if ! gpus=$("$python" -c "$count" 2>/dev/null); then
    fail "$python has no torch: pip install -r requirements.txt," \
        "or run bash demo.sh once, which makes .venv"
fi
processes=${NGPU:-$((gpus > 0 ? gpus : 2))}
[[ $processes =~ ^[1-9][0-9]*$ ]] || fail "NGPU=$NGPU is no number of processes"
cores=$(nproc)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}

is_number() { # is_number NAME...: each of these variables, where it is set
    local name
    for name in "$@"; do
        [[ ${!name:-1} =~ ^[0-9]+$ ]] || fail "$name=${!name} is no number"
    done
}

for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT; do # of Kubeflow where ours are not set
    pet=PET_$name
    [ -n "${!name:-}" ] || declare "$name=${!pet:-}"
done
unset PET_RDZV_BACKEND PET_RDZV_ENDPOINT PET_STANDALONE
is_number NNODES MAX_RESTARTS
if [ "${NNODES:-1}" -gt 1 ]; then
    is_number NODE_RANK MASTER_PORT
    [ -n "${MASTER_ADDR:-}" ] || fail "NNODES=$NNODES: MASTER_ADDR must name the first node"
    [ "${NODE_RANK:-0}" -lt "$NNODES" ] || fail "NODE_RANK=$NODE_RANK of $NNODES nodes"
    rendezvous=(--nnodes "$NNODES" --node_rank "${NODE_RANK:-0}" # torchrun's static rendezvous
        --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29400}")
else
    rendezvous=(--standalone) # a free port of the system's choice
fi

launch() { # launch SCRIPT FLAG...: distributed.launch is torchrun with the scripts' exit codes
    local script=$1 name=$1
    shift
    [ -f "$script" ] || script=$root/$script
    [ -f "$script" ] || fail "$name: no such script; it comes before its flags"
    # As a file: python -m would look into this folder first, for a user's own `distributed`.
    ${exec:-} "$python" "$root/distributed/launch.py" "${rendezvous[@]}" \
        --nproc_per_node "$processes" --max_restarts "${MAX_RESTARTS:-0}" "$script" "$@"
}

train() { # train SCRIPT FLAG...: in the background, so that this shell can hand on signals
    exec="exec" launch "$@" &
    wait $!
}

if [ "$#" -gt 0 ]; then
    exec="exec" launch "$@" # signals reach the launcher, not this shell
fi
trap 'kill $! && wait $!' HUP INT QUIT TERM USR1 USR2 XCPU
if [ "$gpus" -gt 0 ]; then
    train resnet50_test.py
    train transformer_test.py
else
    echo "no GPU: $processes gloo processes with small models and data, so that a CPU can finish"
    train resnet50_test.py --dataset digits --arch resnet20 --bs 32 --optimizer sgd --lr 0.1 \
        --epochs 3
    train transformer_test.py --dataset headlines --bs 8 --lr 4e-4 --epochs 10
fi
