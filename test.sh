#!/usr/bin/env bash
# The whole test suite, under 20 minutes on two cores. Arguments go to pytest: bash test.sh -k resume
#   bash test.sh --legacy    the ancestors' stack in .venv-legacy: ORTModule, torchtext, and both scripts on torch 2.3.1
# DATA_DIR names the folder of the real data sets; tests that need one that is missing are skipped with the reason.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

if [ "${1:-}" = --legacy ]; then
    shift
    bash setup_venv.sh requirements-legacy.txt
    .venv-legacy/bin/python -m cli.capabilities
    exec .venv-legacy/bin/python -m pytest -rs --durations=5 tests/test_{legacy,texts,models,checkpoint,mixup,images}.py "$@"
fi
bash setup_venv.sh requirements-dev.txt
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
.venv/bin/python -m mypy
if command -v shellcheck >/dev/null; then shellcheck ./*.sh figures/*.sh tuning/*.sh; fi
exec .venv/bin/python -m pytest -rs --durations=10 "$@"
