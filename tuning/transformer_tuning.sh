#!/usr/bin/env bash
# Search hyper-parameters of transformer_test.py on a tenth of the training set. Works from any folder.
#   bash tuning/transformer_tuning.sh --trials 40 --jobs 4
#   bash tuning/transformer_tuning.sh --help
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m tuning.transformer_tuning "$@"
