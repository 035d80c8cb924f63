#!/usr/bin/env bash
# Run the experiments of experiments.yaml that have no finished log yet, then draw the figures.
#   bash figures/run_all.sh                         gpu if there is one, else cpu (two cores)
#   bash figures/run_all.sh gpu --minutes 9         stop after 9 minutes; run again to resume
#   bash figures/run_all.sh cpu --only mixup_agnews12k    one group
#   bash figures/run_all.sh cpu --list              what is done, what is open, and the commands
# All experiments run with their first seed before any runs with its second. Nothing starts while a
# file is not committed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv/bin/python
python=${PYTHON:-$([ -x "$venv" ] && echo "$venv" || echo python3)}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m figures.experiments --draw "$@"
