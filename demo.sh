#!/usr/bin/env bash
# What this project is for, on small embedded data, in three minutes on two cores:
#   1. a run that is killed and resumed, beside one that was left alone;
#   2. a race of two optimizers with the same search, and its verdict by paired seeds;
#   3. a Transformer on headlines, exported with a model card.
# No download but the Python packages (5.8 GB with CUDA; setup_venv.sh says how to do without).
#   bash demo.sh [FOLDER]        runs go there (default runs/demo-<time>)
set -euo pipefail
unset CDPATH # with it, cd prints
out=${1:+$(mkdir -p "$1" && cd "$1" && pwd)}
cd "$(dirname "${BASH_SOURCE[0]}")"

bash setup_venv.sh requirements.txt
out=${out:-runs/demo-$(date +%Y%m%d-%H%M%S)}
python=.venv/bin/python
digits=(--dataset digits --arch resnet20 --bs 32 --epochs 4 --threads 1)

echo
echo "== 1. ResNet-20 on 1,437 embedded 8x8 digits with NGD, whitened momentum: --ngd"
"$python" resnet50_test.py "${digits[@]}" --ngd --out "$out/whole"
echo
echo "== The same, killed in its second epoch ..."
"$python" resnet50_test.py "${digits[@]}" --ngd --out "$out/killed" &
run=$!
while kill -0 $run 2>/dev/null && [ ! -s "$out/killed/metrics.jsonl" ]; do sleep 0.2; done
kill -KILL $run 2>/dev/null || true
wait $run 2>/dev/null || true
echo
echo "== ... and resumed: --resume"
"$python" resnet50_test.py --resume "$out/killed"
"$python" -c "import sys, torch; \
first, second = (torch.load(f'{run}/last.pt', weights_only=True)['model'] for run in sys.argv[1:]); \
equal = all(map(torch.equal, first.values(), second.values())); \
print('weights of both runs:', 'equal, bit for bit' if equal else 'DIFFERENT')" \
    "$out/whole" "$out/killed"

echo
echo "== 2. A race: SGD and NGD, each with an equal search on held-out rows, then three seeds"
"$python" -m tuning.compare resnet50_test.py --optimizers sgd ngd --minutes 4 --jobs 2 \
    "${digits[@]}" --out "$out/race"

echo
echo "== 3. Transformer on 400 embedded headlines, without the naive Bayes prior, which is right on"
echo "   96 % of them before anything is learned"
# The best of the rates 1e-4, 2e-4, 3e-4, 4e-4 and 8e-4 on a held-out quarter, mean of three seeds,
# with two blocks.
"$python" transformer_test.py --dataset headlines --optimizer adamw --bs 16 --lr 3e-4 --epochs 12 \
    --weight_decay 0.05 --lr_schedule onecycle --peak 5 --precision fp32 --threads 1 --seed 0 \
    --prior none --out "$out/headlines"
"$python" transformer_test.py --checkpoint "$out/headlines" --export "$out/headlines.pt2"
"$python" -m figures.report "$out/headlines"
run=$(printf %q "$out")
cat <<NEXT

In $run: race/report.html with race/verdict.png, headlines/report.html, headlines.pt2 and its card.

Your own photos and texts, from pretrained weights (docs/own_data.md):
    $python resnet50_test.py --dataset folder --data_dir my_images --arch resnet18 --weights DEFAULT
    $python transformer_test.py --dataset csv --data_dir my_texts
Next:
    $python resnet50_test.py --checkpoint $run/whole --evaluate         # accuracy of each class
    $python resnet50_test.py --arch resnet20 --subset 0.2 --epochs 10   # CIFAR-10, 170 MB, minutes
    bash run_distributed.sh resnet50_test.py --dataset digits --arch resnet20   # all GPUs
    $python resnet50_test.py --help all
NEXT
