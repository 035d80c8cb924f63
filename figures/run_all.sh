#!/usr/bin/env bash
# Run the experiments of experiments.yaml that are not done yet, those of a GPU or those that two CPU cores can carry; then draw.
#   bash figures/run_all.sh                         gpu where there is one, else cpu
#   bash figures/run_all.sh gpu --minutes 9         stop after so long: the run under way is saved, the same command goes on with it
#   bash figures/run_all.sh cpu --only ngd_batch    one group
#   bash figures/run_all.sh cpu --list              what is done, what is open, and the commands
# First come all experiments with their first seed, so that it may be stopped whenever it has shown enough.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m figures.experiments --draw "$@"
