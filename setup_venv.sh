#!/usr/bin/env bash
# Make .venv beside this file and install a requirements file into it: setup_venv.sh requirements.txt
# Nothing is installed again while the requirements stay the same. PYTHON names the interpreter (3.10 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

requirements=$1
stamp=.venv/installed-$requirements
python=${PYTHON:-}
for name in python3 python3.13 python3.12 python3.11 python3.10; do
    [ -n "$python" ] && break
    "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && python=$name
done
if [ -z "$python" ]; then
    echo "error: no Python 3.10 or newer found; install one, or name it: PYTHON=/path/to/python bash $0 $requirements" >&2
    exit 2
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
if [ ! -f "$stamp" ] || ! cat requirements*.txt | cmp -s - "$stamp"; then
    echo "installing $requirements into .venv (torch is large: some minutes the first time)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$requirements"
    cat requirements*.txt >"$stamp"
fi
