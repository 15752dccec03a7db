#!/bin/sh
# Makes the project's own environment. Usage: tools/make-venv.sh PYTHON FOLDER
#
# Debian ships Python without ensurepip unless python3-venv is installed, so a plain `python3 -m venv` can fail on a
# fresh machine. Then pip is taken from the system, from virtualenv, or from the wheel that python3-pip-whl installs.
set -eu
python=$1
folder=$2

"$python" - <<'CHECK'
import sys, sysconfig, os
if sys.version_info < (3, 10):
    sys.exit(f"mojolearn needs Python 3.10 or newer, and {sys.executable} is {sys.version.split()[0]}; "
             "try: make PYTHON=python3.12 ...")
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if not os.path.exists(header):
    sys.exit(f"the C headers of Python are missing ({header}); on Debian: apt-get install python3-dev")
CHECK

if "$python" -m venv "$folder" 2>/dev/null; then
    :
elif "$python" -m virtualenv --version >/dev/null 2>&1; then
    "$python" -m virtualenv "$folder"
else
    rm -rf "$folder"
    "$python" -m venv --without-pip "$folder"
    if "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m pip --python "$folder/bin/python" install pip
    else
        wheel=$(ls /usr/share/python-wheels/pip-*.whl 2>/dev/null | tail -n 1)
        if [ -z "$wheel" ]; then
            rm -rf "$folder"
            echo "this Python has neither ensurepip nor pip; on Debian: apt-get install python3-venv" >&2
            exit 1
        fi
        "$folder/bin/python" "$wheel/pip" install --no-index "$wheel"
    fi
fi
"$folder/bin/python" -m pip install --quiet --upgrade pip
