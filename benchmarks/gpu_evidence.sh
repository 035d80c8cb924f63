#!/usr/bin/env bash
# What a GPU shows of this project, for one that is there for a quarter of an hour, without a network
# and without git, and takes the data in pieces. Four parts:
#
#   bash benchmarks/gpu_evidence.sh pack runs/pieces    first, where the data is: CIFAR-10 in three
#                                                       pieces of 45 MiB, runs/pieces/1 to 3
#   bash benchmarks/gpu_evidence.sh A runs/pieces/1     versions, tests, short runs of
#                                                       every method
#   bash benchmarks/gpu_evidence.sh B runs/pieces/2     speed of ResNet-50's step by setting
#   bash benchmarks/gpu_evidence.sh C runs/pieces/3     joins the data; the named command to its end,
#                                                       and the same without mixing
#   bash benchmarks/gpu_evidence.sh D                   recipe fast94, three seeds, and the search of
#                                                       its rival
#
# A and B need no data and keep their piece for C; C and D again go on with runs that were cut off.
# With a quarter of an hour, give A and B LIMIT=100 and C LIMIT=530, and leave out D. docs/performance.md
# says what a GPU showed. Environment variables and their defaults:
#   OUT        what to take home: a text and an archive of each part, as of D-2 where D ran for the
#              second time (runs/gpu_evidence)
#   WORK       pieces, data, runs, compiled kernels: what must survive from one part to the next,
#              outside this folder (/tmp/gpu_evidence)
#   COMMIT     the commit of this code, where git cannot tell it: git describe --always --dirty
#   LIMIT      seconds of a part (530)
#   ONLY       regular expression of the steps to run, such as 'compile-.*|join' (all)
#   MINIATURE  1 runs all steps in little on a CPU, with digits for CIFAR-10
#   PYTHON     interpreter (.venv/bin/python where it exists, else python3)
#   DATA_DIR   of pack: folder of the data sets (data)
# A step that fails or takes too long does not stop the next one. The exit code is 1 if one did, and
# 2 if nothing was started.
set -euo pipefail
unset CDPATH # with it, cd prints
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
self=$root/benchmarks/gpu_evidence.sh
data_set=cifar-10-batches-py
archive=cifar10.tar.xz
packages=(torch torchvision numpy PIL yaml tqdm tokenizers sklearn) # of the scripts and benchmarks

fail() {
    echo "error: $*" >&2
    exit 2
}

pack() { # pack DIR: the data in three pieces, each in a folder of its own with the checksums of all
    local data=${DATA_DIR:-$root/data} name number
    [ -d "$data/$data_set" ] || fail "$data/$data_set is missing: set DATA_DIR"
    rm -rf "$1"/{whole,1,2,3}
    mkdir -p "$1"/{whole,1,2,3}
    tar -C "$data" -cJf "$1/whole/all" "$data_set"
    split -n 3 -d -a 1 "$1/whole/all" "$1/whole/$archive."
    (cd "$1/whole" && sha256sum "$archive".* >sums)
    for number in 1 2 3; do
        name=$archive.$((number - 1))
        mv "$1/whole/$name" "$1/$number/"
        cp "$1/whole/sums" "$1/$number/"
        echo "$1/$number: $(($(wc -c <"$1/$number/$name") / 2 ** 20)) MiB"
    done
    rm -r "$1/whole"
}

join() { # the data out of the pieces that have come
    cd "$work/pieces"
    sha256sum --check --quiet --strict sums
    mkdir -p "$work/data"
    cat "$archive".* >"$archive"
    "$python" -m tarfile -e "$archive" "$work/data"
    rm "$archive"
    echo "$(wc -l <sums) pieces joined, $(du -sh "$work/data/$data_set" | cut -f 1) of data"
}

# -------------------------------------------------------------------- steps

number=0
slots=$(($(nproc) > 8 ? $(nproc) / 3 : 1)) # steps of `beside` at a time

begin() { # begin NAME: whether this step is to run; its number orders the summary
    [[ $1 =~ ^(${ONLY:-.*})$ ]] || return 1
    number=$((number + 1))
    title=$(printf '%02d-%s' "$number" "$1")
}

step() { # step NAME SECONDS COMMAND...: run it alone, and show how it ended
    begin "$1" || return 0
    run "$title" "${@:2}"
    show "$title"
}

beside() { # beside NAME SECONDS COMMAND...: run it beside others; `wait_for_all` shows them
    begin "$1" || return 0
    while [ "$(jobs -rp | wc -l)" -ge "$slots" ]; do sleep 0.2; done
    run "$title" "${@:2}" &
}

wait_for_all() {
    local end
    wait
    for end in "$logs"/*.end; do
        [ -e "$end" ] && [ ! -e "${end%.end}.shown" ] && show "$(basename "$end" .end)"
    done
    return 0
}

run() { # run TITLE SECONDS COMMAND...: output in TITLE.log, line of the summary in TITLE.end
    local log=$logs/$1.log limit=$2 code=0 start=$SECONDS left=$((deadline - SECONDS)) result=ok
    if [ "$left" -lt 5 ]; then
        printf '%-9s %5s  %-22s %s\n' skipped '' "$1" "the time of the part is over" \
            >"$logs/$1.end"
        return
    fi
    timeout -k 10 "$((limit < left ? limit : left))" "${@:3}" >"$log" 2>&1 </dev/null || code=$?
    case $code in
    0) ;;
    124 | 137) result=timeout ;;
    *) result="failed $code" ;;
    esac
    printf '%-9s %3d s  %-22s %s\n' "$result" $((SECONDS - start)) "$1" \
        "$(last_lines "$log" 1 | sed 's/; run folder .*//' | cut -c 1-170)" >"$logs/$1.end"
}

last_lines() { # last_lines LOG COUNT: without empty ones and what a progress bar wrote over
    sed -e 's/.*\r//' -e '/^ *$/d' "$1" | tail -n "$2"
}

show() { # show TITLE: how a step ended, and the end of what a failed one wrote
    cat "$logs/$1.end"
    touch "$logs/$1.shown"
    if [ -e "$logs/$1.log" ] && ! grep -q '^ok ' "$logs/$1.end"; then
        last_lines "$logs/$1.log" 15 | sed 's/^/    | /'
    fi
}

# -------------------------------------------------------------------- parts

part_A() {
    beside tests 240 "$python" -m pytest -p no:cacheprovider "${tests[@]}"
    smoke_runs
}

smoke_runs() { # every method for a few epochs: embedded digits, and embedded headlines
    local digits=(resnet50_test.py --dataset digits --arch resnet20 --bs 64 --epochs 2
        --optimizer sgd --lr 0.05)
    local texts=(transformer_test.py --dataset headlines --bs 16 --lr 4e-4 --epochs 3)
    image sgd
    image compile --backend compile
    image cudagraph --backend cudagraph
    image ngd-cudagraph --ngd --backend cudagraph
    image lamb-cudagraph --optimizer lamb --lr 0.01 --backend cudagraph
    image lars-cudagraph --optimizer lars --lr 1 --backend cudagraph
    image ngd --ngd
    image kaldi-ngd --optimizer kaldi_ngd --ngd_rank 80 --backend compile
    image meta --ngd --meta_learning
    image cutmix --mixup cutmix
    image mixup-fp16 --mixup mixup --precision fp16
    image adamw --optimizer adamw --lr 1e-3
    image muon --optimizer muon
    image lamb --optimizer lamb --lr 0.01
    image lars --optimizer lars --lr 1
    image fuse --fuse
    image checkpointing --checkpoint_activations
    image batch-noise --dynamic_batch noise --max_bs 256
    image batch-increase --dynamic_batch increase --max_bs 256 --backend compile
    image streamed --resident no
    image deterministic --deterministic
    ranks ddp
    ranks ddp-bf16 --grad_compress bf16
    ranks ddp-int4 --grad_compress int4
    ranks slamb --optimizer slamb --lr 0.003 --dense_steps 2
    ranks slamb-int4 --optimizer slamb --lr 0.003 --dense_steps 2 --wire_dtype int4
    ranks local-sgd --sync local --local_steps 4
    ranks diloco --sync diloco --local_steps 4
    text text
    text text-cudagraph --backend cudagraph
    wait_for_all
    beside resume-cudagraph 60 "$python" resnet50_test.py --resume "$logs/cudagraph" --epochs 4
    wait_for_all
}

image() { # image NAME FLAG...
    beside "$1" 100 "$python" "${digits[@]}" "${@:2}" "${small_images[@]}" --out "$logs/$1"
}

ranks() { # ranks NAME FLAG...: two processes that share the GPU
    beside "$1" 100 env NGPU=2 bash run_distributed.sh "${digits[@]}" --device cuda:0 "${@:2}" \
        "${small_images[@]}" --out "$logs/$1"
}

text() { # text NAME FLAG...
    beside "$1" 100 "$python" "${texts[@]}" "${@:2}" "${small[@]}" --out "$logs/$1"
}

part_B() { # what the recipes use comes first
    setting eager-256 --bs 256
    probe plain-256 90 plain --more --bs 256 --optimizer sgd "${small_images[@]}"
    setting ngd-256 --bs 256 --ngd
    setting ngd-cudagraph-256 --bs 256 --ngd --backend cudagraph
    setting compile-256 --bs 256 --backend compile
    setting cudagraph-256 --bs 256 --backend cudagraph
    setting ngd-compile-1024 --bs 1024 --backend compile --ngd
    setting eager-512 --bs 512
    setting kaldi-ngd-256 --bs 256 --optimizer kaldi_ngd
    setting cudagraph-64 --bs 64 --backend cudagraph
    setting lamb-256 --bs 256 --optimizer lamb
    setting compile-512 --bs 512 --backend compile
    setting compile-1024 --bs 1024 --backend compile
    setting fp16-512 --bs 512 --precision fp16
    setting eager-128 --bs 128
}

setting() { # setting NAME FLAG...: the step of ResNet-50 with these flags, on random pixels
    probe "$1" 150 step --more --optimizer sgd "${@:2}" "${small_images[@]}"
}

probe() { # probe NAME SECONDS WORD...
    step "$1" "$2" "$python" -m benchmarks.gpu_probe "$3" "${quick[@]}" --json "$logs/$1.json" \
        "${@:4}"
}

part_C() {
    step join 60 bash "$self" join
    train step gpu_named/ngd-meta-seed0 280 --ngd --meta_learning --seed 0
    train step gpu_named/ngd-seed0 280 --ngd --seed 0
    accuracies
}

part_D() { # what only has an accuracy beside one another; one through the compiler alone
    local seed lr
    slots=2
    for seed in 0 1 2; do
        fast94 beside "gpu_fast94/ngd-seed$seed" --ngd --seed "$seed"
    done
    wait_for_all
    slots=7
    for lr in 0.1 0.2 0.4; do
        fast94 beside "gpu_fast94_search/sgd-lr$lr-seed0" "${held_out[@]}" --optimizer sgd \
            --lr "$lr" --seed 0
    done
    fast94 beside gpu_fast94_search/ngd-seed0 "${held_out[@]}" --ngd --seed 0
    wait_for_all
    fast94 step gpu_fast94/ngd-compile-seed0 --ngd --backend compile --seed 0
    accuracies
}

accuracies() {
    grep '^last.pt' "$logs"/*.log | sed 's/.*[/]//' || true
}

fast94() { # fast94 HOW FOLDER FLAG...: 12 epochs of ResNet-50, as on the CPU
    train "$1" "$2" 280 --recipe fast94 --epochs 12 --small_epochs 7 --small_size 16 \
        --small_stages 2 --eval_every 12 "${@:3}"
}

train() { # train HOW FOLDER SECONDS FLAG...: the command of the plan, figures/experiments.yaml
    local folder=$work/runs/$2 resume=()
    [ -e "$folder/last.pt" ] && resume=(--resume "$folder")
    "$1" "${2#*/}" "$3" "$python" resnet50_test.py "${@:4}" "${small_data[@]}" --out "$folder" \
        "${resume[@]}"
}

# -------------------------------------------------------------------- one part

check_packages() {
    local missing code='
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        print(name)'
    command -v "$python" >/dev/null || fail "$python is not there: set PYTHON"
    missing=$("$python" -c "$code" "${packages[@]}" | paste -s -d ' ')
    [ -z "$missing" ] || fail "$python lacks these packages: $missing (see requirements.txt)"
}

main() { # main PART ARGUMENT...
    echo "== part $part of ${COMMIT:-an unknown commit}, $(date -u +%FT%TZ)"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null ||
        echo "no nvidia-smi here"
    "part_$part" "$@"
    [ "$number" -gt 0 ] || fail "no step of part $part is called $ONLY"
    echo "== summary of part $part: $number steps in $SECONDS s"
    cat "$logs"/*.end | tee "$logs/summary.txt"
    mkdir -p "$work/runs"
    tar -czf "$OUT/${logs##*/}.tgz" -C "$work" --exclude='*.pt' --exclude='*.shown' \
        "${logs##*/}" runs
    ! grep -qv '^ok ' "$logs/summary.txt"
}

part=${1:-}
work=$(realpath -m "${WORK:-/tmp/gpu_evidence}")
venv=$root/.venv/bin/python
python=${PYTHON:-$([ -x "$venv" ] && echo "$venv" || echo python3)}
case $part in
pack)
    pack "${2:?usage: gpu_evidence.sh pack DIR}"
    exit
    ;;
join)
    join
    exit
    ;;
A | B | C | D) shift ;;
*) fail "usage: gpu_evidence.sh pack DIR | A PIECE | B PIECE | C PIECE | D" ;;
esac

small=() small_images=() small_data=() quick=() held_out=(--val_fraction 0.1 --no-test)
tests=(-n 4 tests/unit/test_gpu.py tests/unit/test_graphs.py)
if [ -n "${MINIATURE:-}" ]; then # the later flag counts, so that these replace those of the steps
    small=(--device cpu --backend eager --precision fp32 --threads 1 --workers 0 --bs 16
        --epochs 1 --warmup 0)
    small_images=("${small[@]}" --arch resnet8 --subset 0.2)
    small_data=("${small_images[@]}" --dataset digits # whose images are of 8 pixels, not to mirror
        --small_epochs 0 --no-alternate_flip --crop_fill black --test_views none)
    quick=(--quick)
    tests=(tests/unit/test_gpu.py -k "crops or streamed")
    slots=1
fi
[ "$part" = A ] && packages+=(pytest xdist) # of the tests
OUT=$(realpath -m "${OUT:-$root/runs/gpu_evidence}")
logs=$work/$part attempt=1
deadline=$((SECONDS + ${LIMIT:-530}))
check_packages
[ -z "${1:-}" ] || [ -e "$1/sums" ] || fail "no piece of the data is in $1"
while [ -e "$logs" ]; do # a part that runs again keeps what it showed before
    attempt=$((attempt + 1))
    logs=$work/$part-$attempt
done
mkdir -p "$OUT" "$logs" "$work/pieces"
if [ -n "${1:-}" ]; then
    cp "$1/$archive".* "$1/sums" "$work/pieces/" # this folder may be another one in the next part
fi
export DATA_DIR=$work/data PYTHON=$python WORK=$work PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=$work/inductor TRITON_CACHE_DIR=$work/triton
cd "$root"
main "$@" 2>&1 | tee "$OUT/${logs##*/}.txt"
