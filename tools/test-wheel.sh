#!/bin/sh
# Builds the source distribution and from it the wheel with one interpreter, installs the wheel in a fresh environment
# where no compiler is found, and runs the tests against what is installed.
# Usage: tools/test-wheel.sh PYTHON FOLDER [NUMPY VERSION] [PYTEST OPTIONS]
set -eu
python=$1
folder=$2
numpy=${3:-}
shift 2
[ $# -eq 0 ] || shift

rm -rf "$folder"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
sh tools/make-venv.sh "$python" "$folder/build-env"
"$folder/build-env/bin/python" -m pip install --quiet "build>=1"
"$folder/build-env/bin/python" -m build --outdir "$folder/dist" . >"$folder/build.log" 2>&1 || {
    tail -n 40 "$folder/build.log" >&2
    exit 1
}

sh tools/make-venv.sh "$python" "$folder/env"
wheel=$(ls "$folder"/dist/*.whl)
# Nothing but the environment is on the path, so whatever had to be compiled would fail.
PATH="$folder/env/bin" "$folder/env/bin/python" -m pip install --quiet "${wheel}[test]" ${numpy:+"numpy==$numpy"}

# The tests come from the source distribution, without the package beside them.
tar -xzf "$folder"/dist/*.tar.gz -C "$folder"
cd "$folder"/mojolearn-*/
rm -rf mojolearn
"$folder/env/bin/python" - <<'WHERE'
import mojolearn, numpy, sys
print(f"mojolearn of {mojolearn.__file__}, Python {sys.version.split()[0]}, NumPy {numpy.__version__}")
WHERE
exec "$folder/env/bin/python" -m pytest "$@"
