#!/bin/sh
# Runs the tests on a build with Cython's checks on and, where the compiler has them, the address and
# undefined-behaviour sanitizers. Usage: tools/test-debug.sh PYTHON FOLDER [PYTEST OPTIONS]
set -eu
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
folder=$2
shift 2
compiler=${CC:-cc}

mkdir -p "$folder"
for part in *.py *.toml *.md *.cff LICENSE Makefile mojolearn tests tools benchmarks examples docs; do
    rm -rf "${folder:?}/$part"
    cp -R "$part" "$folder/"
done
cd "$folder"
find mojolearn -name '*.so' -delete
# Without the fast build's C files: Cython does not see that its directives have changed.
find mojolearn/_core -name '*.c' -delete

export MOJOLEARN_DEBUG=1
preload=
if echo 'int main(void) { return 0; }' | "$compiler" -fsanitize=address,undefined -x c - -o sanitized 2>/dev/null; then
    rm -f sanitized
    export MOJOLEARN_SANITIZE=1
    # An instrumented module needs the run-time libraries loaded before the interpreter allocates anything.
    for library in libasan.so libubsan.so; do
        path=$("$compiler" -print-file-name="$library")
        case "$path" in /*) preload="$preload $path" ;; esac
    done
else
    echo "the compiler has no sanitizers: only Cython's checks are on" >&2
fi
"$python" setup.py build_ext --inplace

# CPython keeps objects until it ends on purpose, so leaks are not reported.
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
exec env LD_PRELOAD="${preload# }" "$python" -m pytest "$@"
