#!/usr/bin/env bash
# Train on several nodes under Slurm: run_distributed.sh on each node, one process per GPU.
#
#   sbatch --nodes=2 --gpus-per-node=4 run_slurm.sh resnet50_test.py --bs 256
#
# Slurm sends SIGTERM 120 s before the time limit, and the launcher kills what still runs 110 s
# later (TORCH_ELASTIC_SHUTDOWN_TIMEOUT): a checkpoint must be written within that time.
#
#SBATCH --job-name=faster-training
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@120
set -euo pipefail

root=${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")}
export NNODES=${SLURM_JOB_NUM_NODES:?run this through sbatch or salloc}
export JOB_ID=${SLURM_JOB_ID}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}

# shellcheck disable=SC2016  # SLURM_NODEID is expanded on each node
exec srun --ntasks-per-node=1 bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$0" "$@"' \
    "$root/run_distributed.sh" "$@"
