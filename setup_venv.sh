#!/usr/bin/env bash
# Make a virtual environment beside this file and install a requirements file into it:
#   bash setup_venv.sh requirements.txt           # .venv, the default stack
#   bash setup_venv.sh requirements-dev.txt       # .venv, with what the tests need
#   bash setup_venv.sh requirements-legacy.txt    # .venv-legacy, with ORTModule's C++ extensions;
#                                                 # needs Python 3.10 or 3.11 and g++
# A second call installs nothing unless a file that pip reads has changed. The environment variable
# PYTHON names the interpreter (3.10 or newer).
set -euo pipefail
unset CDPATH # with it, cd prints
cd "$(dirname "${BASH_SOURCE[0]}")"

requirements=${1:-}
requirements=${requirements#./}
if [[ $requirements != requirements*.txt || ! -f $requirements ]]; then
    echo "error: usage: bash $0 requirements.txt (or another one beside it)" >&2
    exit 2
fi
venv=.venv newest_minor=99 supported="Python 3.10 or newer"
read_by_pip=(requirements.txt "$requirements") # a file that names the first one
if [ "$requirements" = requirements-legacy.txt ]; then
    venv=.venv-legacy newest_minor=11 supported="Python 3.10 or 3.11"
    read_by_pip=("$requirements")
fi

python=
names=(python3 python3.13 python3.12 python3.11 python3.10)
[ -z "${PYTHON:-}" ] || names=("$PYTHON")
for name in "${names[@]}"; do
    [ -n "$python" ] && break
    "$name" -c "import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, $newest_minor))" \
        2>/dev/null && python=$name
done
if [ -z "$python" ]; then
    echo "error: there is no $supported; install one, or name it:" \
        "PYTHON=/path/to/python bash $0 $requirements" >&2
    exit 2
fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # not there, or half made
    rm -f "$venv"/installed-*
    for link in "$venv"/bin/python*; do # to an interpreter that is gone
        [ -e "$link" ] || rm -f "$link"
    done
    "$python" -m venv "$venv"
fi
installed=$venv/installed-$requirements # a copy of what pip has read
if [ ! -f "$installed" ] || ! cat "${read_by_pip[@]}" | cmp -s - "$installed"; then
    echo "installing $requirements into $venv (some minutes the first time)"
    if [ "$venv" = .venv ] && ! "$venv/bin/python" -c "import torch" 2>/dev/null; then
        echo "It takes 5.8 GB, most of it torch with its CUDA libraries. To save most of that on a"
        echo "machine without a GPU, stop now (Ctrl-C), install the CPU build of torch first, and"
        echo "start again:"
        echo "    $venv/bin/python -m pip install torch torchvision" \
            "--index-url https://download.pytorch.org/whl/cpu"
    fi
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
    if [ "$venv" = .venv-legacy ]; then
        echo "building ORTModule's C++ extensions (some minutes)"
        log=$venv/extensions.log
        if ! PATH=$PWD/$venv/bin:$PATH \
            "$venv/bin/python" -m backends.build_ort_extensions >"$log" 2>&1; then
            tail -n 5 "$log" >&2
            echo "error: ORTModule's C++ extensions were not built: they need g++;" \
                "the log is $log" >&2
            exit 2
        fi
    fi
    cat "${read_by_pip[@]}" >"$installed"
fi
