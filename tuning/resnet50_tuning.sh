#!/usr/bin/env bash
# Search hyper-parameters of resnet50_test.py on a tenth of the training set, from any folder.
#   bash tuning/resnet50_tuning.sh --trials 40 --jobs 4
#   bash tuning/resnet50_tuning.sh --help
set -euo pipefail
unset CDPATH # with it, cd prints
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv/bin/python
python=${PYTHON:-$([ -x "$venv" ] && echo "$venv" || echo python3)}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" "$root/tuning/sweep.py" "$@" # as a file: -m would look into this folder first
