#!/usr/bin/env bash
# Make a virtual environment beside this file and install a requirements file into it:
#   bash setup_venv.sh requirements.txt            .venv
#   bash setup_venv.sh requirements-legacy.txt     .venv-legacy, with ORTModule's C++ extensions built (Python 3.10 or 3.11, g++)
# Nothing is installed again while the requirements stay the same. PYTHON names the interpreter (3.10 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

requirements=$1
venv=.venv newest=99 wanted="Python 3.10 or newer"
[ "$requirements" = requirements-legacy.txt ] && venv=.venv-legacy newest=11 wanted="Python 3.10 or 3.11"
stamp=$venv/installed-$requirements
python=
for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    [ -n "$python" ] && break
    "$name" -c "import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, $newest))" 2>/dev/null && python=$name
done
if [ -z "$python" ]; then
    echo "error: no $wanted found; install one, or name it: PYTHON=/path/to/python bash $0 $requirements" >&2
    exit 2
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
if [ ! -f "$stamp" ] || ! cat requirements*.txt | cmp -s - "$stamp"; then
    echo "installing $requirements into $venv (torch is large: some minutes the first time)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
    if [ "$venv" = .venv-legacy ]; then
        echo "building ORTModule's C++ extensions (some minutes)"
        log=$venv/extensions.log
        if ! PATH=$PWD/$venv/bin:$PATH "$venv/bin/python" -m backends.build_ort_extensions >"$log" 2>&1; then
            tail -n 5 "$log" >&2
            echo "error: ORTModule's C++ extensions were not built: they need g++; all of the log is in $log" >&2
            exit 2
        fi
    fi
    cat requirements*.txt >"$stamp"
fi
