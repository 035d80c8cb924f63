#!/usr/bin/env bash
# Train ResNet-50 on embedded digits and the Transformer on embedded headlines, and draw both runs.
# Three minutes on two cores, no download but the Python packages.
#   bash demo.sh [FOLDER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

bash setup_venv.sh requirements.txt
out=${1:-runs/demo-$(date +%Y%m%d-%H%M%S)}
python=.venv/bin/python
echo "== ResNet-50 on 1,437 embedded 8x8 digits"
"$python" resnet50_test.py --dataset digits --bs 64 --lr 0.01 --epochs 10 --warmup 1 --nesterov \
    --out "$out/resnet50"
echo "== Transformer on 400 embedded headlines"
"$python" transformer_test.py --dataset headlines --bs 16 --lr 4e-4 --epochs 12 \
    --out "$out/transformer"
echo "== Figure"
"$python" -m figures.draw --runs "$out/resnet50" "$out/transformer" --out "$out/accuracy.png"
cat <<NEXT

Next:
  accuracy of each class
    $python resnet50_test.py --resume $out/resnet50 --evaluate
  export the Transformer
    $python transformer_test.py --resume $out/transformer --export headlines.pt2
  a tenth of CIFAR-10 (downloads 170 MB)
    $python resnet50_test.py --arch resnet18 --subset 0.1 --epochs 10
  two processes, or all GPUs
    bash run_distributed.sh resnet50_test.py --dataset digits --arch resnet20 --bs 32 --epochs 3
  all flags
    $python resnet50_test.py --help all
NEXT
