#!/usr/bin/env bash
# Train on several nodes under Slurm: run_distributed.sh on each node, one process per GPU.
#
#   sbatch --nodes=2 --gpus-per-node=4 --cpus-per-task=32 run_slurm.sh resnet50_test.py --bs 256
#
# A job that is preempted, or whose node fails, is queued again and goes on with its run. Its run
# folder is runs/SCRIPT-JOBID, or --out of the command line (not of a recipe); the same command with
# the same --out goes on with that run as well. From another folder the repository is found by
# Slurm, or is REPO.
#
# Slurm sends SIGTERM 120 s before the time limit, and the launcher kills what still runs 110 s
# later (TORCH_ELASTIC_SHUTDOWN_TIMEOUT): a checkpoint must be written within that time.
#
#SBATCH --job-name=faster-training
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

export NNODES=${SLURM_JOB_NUM_NODES:?run this through sbatch or salloc}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
export NGPU=${NGPU:-${SLURM_GPUS_ON_NODE:-}} # a node that sees fewer ends with a clear error
# srun does not take it from sbatch, and would give all processes of a node one core.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}
unset SLURM_CPUS_PER_GPU # srun refuses both
export SLURM_EXPORT_ENV=ALL # what is exported here, also where sbatch had --export

# sbatch runs a copy of this file elsewhere, and knows where the file was.
submitted=$({ scontrol show job -o "$SLURM_JOB_ID" || true; } | sed -n 's/.* Command=\([^ ]*\).*/\1/p')
for root in "${REPO:-}" "$(dirname "${BASH_SOURCE[0]}")" "${SLURM_SUBMIT_DIR:-}" \
    "$(dirname "$submitted")" ""; do
    [ ! -f "$root/run_distributed.sh" ] || break
done
if [ -z "$root" ]; then
    echo "error: the repository is not found: set REPO to its folder" >&2
    exit 2
fi

[ "$#" -gt 0 ] || { echo "error: which script? $0 resnet50_test.py ..." >&2 && exit 2; }
script=$1 out="" before=""
shift
for word in "$@"; do
    case $before in --out | --output | --output[-_]dir) out=$word ;; esac
    case $word in --out=* | --output=* | --output[-_]dir=*) out=${word#*=} ;; esac
    before=$word
done
is_again=$((${SLURM_RESTART_COUNT:-0} > 0)) # Slurm has queued this job before
own=runs/$(basename "$script" .py)-$SLURM_JOB_ID # a job that is queued again keeps its number
flags=" $* "
flags=${flags/ --resume[= ]auto / }
case ${flags/ -r auto / } in
*" --evaluate"* | *" --predict"* | *" --export"*) ;;
*" --resume"* | *" -r "*) # from another run: a job that is queued again goes on with its own
    if ((is_again)) && compgen -G "$out/last*.pt" >/dev/null; then set -- "$@" --resume auto; fi
    ;;
*) # flags that the user gives come later and win
    if ((is_again)) || [ -n "$out" ]; then set -- --resume auto "$@"; fi
    set -- --out "$own" "$@"
    ;;
esac

# shellcheck disable=SC2016  # SLURM_NODEID is expanded on each node
exec srun --ntasks="$NNODES" --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$0" "$@"' \
    "$root/run_distributed.sh" "$script" "$@"
