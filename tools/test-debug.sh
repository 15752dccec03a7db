#!/bin/sh
# Runs the tests on a build with Cython's checks on and, where the compiler has them, the address and
# undefined-behaviour sanitizers. Usage: tools/test-debug.sh PYTHON FOLDER
set -eu
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
folder=$2

mkdir -p "$folder"
for part in setup.py pyproject.toml README.md LICENSE mojolearn tests benchmarks examples docs; do
    if [ -e "$part" ]; then
        rm -rf "${folder:?}/$part"
        cp -R "$part" "$folder/"
    fi
done
cd "$folder"
find mojolearn/_core '(' -name '*.so' -o -name '*.c' ')' -delete

# An instrumented module needs the sanitizers' run-time libraries loaded before the interpreter's own allocations.
preload=
for library in libasan.so libubsan.so; do
    path=$("${CC:-cc}" -print-file-name="$library")
    case "$path" in /*) preload="$preload $path" ;; esac
done
if [ -n "$preload" ]; then export MOJOLEARN_SANITIZE=1; fi
MOJOLEARN_DEBUG=1 "$python" setup.py build_ext --inplace

# CPython keeps objects until exit on purpose: leaks are not reported.
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
exec env LD_PRELOAD="${preload# }" "$python" -m pytest
