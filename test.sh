#!/usr/bin/env bash
# Run the checks and tests. Further arguments go to pytest: bash test.sh -k resume
#   bash test.sh             style, types, fast tests: four minutes on two cores with bf16
#   bash test.sh --all       the same with all tests
#   bash test.sh --legacy    the tests of the legacy stack (torch 2.3.1, ORTModule, torchtext)
# DATA_DIR names the folder of the real data sets; tests that need a missing one are skipped.
set -euo pipefail
unset CDPATH # with it, cd prints
cd "$(dirname "${BASH_SOURCE[0]}")"

case ${1:-} in
--legacy)
    shift
    bash setup_venv.sh requirements-legacy.txt
    exec .venv-legacy/bin/python -m pytest -rs --durations=5 \
        tests/unit/test_{legacy,texts,models,checkpoint,mixup,images}.py "$@"
    ;;
--all)
    shift
    selection=""
    ;;
*)
    selection="not process and not compile"
    ;;
esac

bash setup_venv.sh requirements-dev.txt
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
.venv/bin/python -m mypy
if command -v shellcheck >/dev/null; then shellcheck ./*.sh tuning/*.sh benchmarks/*.sh .ci/run; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # a process of pytest for each core
exec .venv/bin/python -m pytest -rs --durations=10 -n auto --dist loadfile -m "$selection" "$@"
