#!/usr/bin/env bash
# Batches that stay, grow, shrink or follow the loss: MNIST and CIFAR-10 subsets on one, two and four processes.
# bash benchmarks/four_ways.sh [DIR]      run folders go to DIR (default figures/logs), about 20 minutes on two cores
# Then: python figures/draw.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

logs=${1:-figures/logs}
common=(--arch resnet8 --subset 0.1 --epochs 8 --lr 0.05 --lr_schedule constant --warmup 1 --workers 0)
limits=(--min_bs 32 --max_bs 512)
for processes in 1 2 4; do
  for dataset in mnist cifar10; do
    for way in static increase decrease loss; do
      out=$logs/dynamic_batch_${dataset}_${processes}p/$way-seed0
      [ -e "$out/metrics.jsonl" ] && continue # so that it can be started again
      case $way in
        static) flags=() ;;
        loss) flags=(--dynamic_batch loss --loss_window 3 "${limits[@]}") ;;
        *) flags=(--dynamic_batch "$way" "${limits[@]}") ;;
      esac
      NGPU=$processes bash run_distributed.sh resnet50_test.py --dataset "$dataset" --bs $((128 / processes)) \
        "${common[@]}" "${flags[@]}" --out "$out"
      rm -f "$out"/*.pt
    done
  done
done
