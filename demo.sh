#!/usr/bin/env bash
# Three minutes on two cores: ResNet-50 on embedded digits, the Transformer on embedded headlines, a picture of both.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

bash setup_venv.sh requirements.txt
out=${1:-runs/demo-$(date +%Y%m%d-%H%M%S)}
echo "== ResNet-50 on 1,437 embedded 8x8 digits"
.venv/bin/python resnet50_test.py --dataset digits --bs 64 --lr 0.01 --epochs 10 --warmup 1 --nesterov --out "$out/resnet50"
echo "== Transformer on 400 embedded headlines"
.venv/bin/python transformer_test.py --dataset headlines --bs 16 --lr 4e-4 --epochs 12 --out "$out/transformer"
echo "== Picture and summary"
.venv/bin/python -m figures.draw --runs "$out/resnet50" "$out/transformer" --out "$out/accuracy.png"
cat <<EOF

Next:
  .venv/bin/python resnet50_test.py --resume $out/resnet50 --evaluate             accuracy of each class
  .venv/bin/python transformer_test.py --resume $out/transformer --export headlines.pt2
  .venv/bin/python resnet50_test.py --arch resnet18 --subset 0.1 --epochs 10      CIFAR-10 (downloads 170 MB)
  bash run_distributed.sh resnet50_test.py --dataset digits --arch resnet20 --bs 32 --epochs 3
  .venv/bin/python resnet50_test.py --help
EOF
