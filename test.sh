#!/usr/bin/env bash
# The whole test suite, under 15 minutes on two cores. Arguments go to pytest: bash test.sh -k resume
# DATA_DIR names the folder of the real data sets; tests that need one that is missing are skipped with the reason.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

bash setup_venv.sh requirements-dev.txt
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
.venv/bin/python -m mypy
if command -v shellcheck >/dev/null; then shellcheck ./*.sh; fi
exec .venv/bin/python -m pytest -rs --durations=10 "$@"
