#!/bin/sh
# Runs the tests of the native kernels under sanitizers, on a copy of the package. Before that, the sanitizers must find
# planted bugs. Usage: scripts/sanitize.sh [--self-test] [KIND...]. The `python` on the PATH must have triforce's packages.
# TESTS names the tests to run. KIND is a value of -fsanitize: by default first address,undefined and then thread.
set -eu
cd "$(dirname "$0")/.."
compiler=${CXX:-g++}
self_test_only=
if [ "${1:-}" = --self-test ]; then self_test_only=yes && shift; fi
[ $# -gt 0 ] || set -- address,undefined thread

# Runs a command with the sanitizer's runtime preloaded, because Python is not built with it. libstdc++ is preloaded, too,
# because the runtime could not intercept exceptions otherwise. The report goes to a file. TSan sees the locks of Python and
# torch, and ignores their memory, because they are not instrumented. die_after_fork=0: a test forks a process with threads.
under() {
    LD_PRELOAD="$("$compiler" -print-file-name="$runtime") $("$compiler" -print-file-name=libstdc++.so.6)" \
        ASAN_OPTIONS=abort_on_error=1 LSAN_OPTIONS=exitcode=0 UBSAN_OPTIONS=print_stacktrace=1 \
        TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1:die_after_fork=0 \
        PYTHONMALLOC=malloc OMP_NUM_THREADS=1 PYTHONPATH="$PWD/$folder/package" "$@" 2>"$folder/report"
}

# Prints leaks of memory that a line of the kernels allocated. Python, torch and other libraries do not free all memory when
# they end, so other leaks are no failures: their stacks contain no line of the kernels.
leaks() {
    awk '/ leak of / { what = $0 }
        /^ *#/ && /csrc\/|mutants\/planted/ && what { print what; print; what = "" }
        /^$/ { what = "" }' "$folder/report"
}

die() {
    printf '%s\n' "$*" >&2
    exit 1
}

call_planted() { under python -c "import ctypes; ctypes.CDLL('$PWD/$folder/planted.so').$1()"; }

must_find() { # BUG WORDS
    if call_planted "$1"; then die "-fsanitize=$kind does not find the planted bug $1"; fi
    grep -q "$2" "$folder/report" || die "-fsanitize=$kind fails for another reason than $1"
}

self_test() {
    "$compiler" -std=c++17 -g -O1 -fPIC -shared -pthread -fsanitize="$kind" -fno-sanitize-recover=undefined \
        tests/helpers/mutants/planted.cpp -o "$folder/planted.so"
    call_planted nothing || die "-fsanitize=$kind fails where nothing is wrong"
    [ -z "$(leaks)" ] || die "-fsanitize=$kind finds leaks where there are none"
    case $kind in *address*)
        must_find out_of_bounds heap-buffer-overflow
        must_find use_after_free heap-use-after-free
        call_planted leak && [ -n "$(leaks)" ] || die "-fsanitize=$kind does not find the planted leak" ;;
    esac
    case $kind in *undefined*)
        must_find too_wide_a_shift "shift exponent 40"
        must_find overflow "signed integer overflow" ;;
    esac
    case $kind in thread) must_find race "data race" ;; esac
    echo "-fsanitize=$kind finds the planted bugs"
}

build() {
    mkdir -p "$folder/package/triforce"
    rm -rf "$folder/package/triforce"
    cp -r src/triforce "$folder/package/triforce"
    rm -f "$folder"/package/triforce/backends/cpu/_native.*.so
    cmake -S . -B "$folder/cmake" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DPython_EXECUTABLE="$(command -v python)" -DTRIFORCE_SANITIZE="$kind" ${levels:+-DTRIFORCE_LEVELS="$levels"} \
        -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$folder/package/triforce/backends/cpu"
    cmake --build "$folder/cmake"
    # An editable install precedes PYTHONPATH: without this line its kernels would be tested, which have no sanitizer.
    echo 'import sys; sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]' \
        >"$folder/package/sitecustomize.py"
    under python -c "from triforce.backends.cpu import _native; print(_native.__file__)" | grep -q "^$PWD/$folder/" ||
        die "the tests would not load the kernels in $folder"
}

for kind; do
    folder=build/sanitize-$(echo "$kind" | tr , -)
    mkdir -p "$folder"
    case $kind in
        thread) runtime=libtsan.so levels=portable ;; # code above the levels divides work between threads, alike for all
        *) runtime=libasan.so levels= ;;
    esac
    self_test
    [ -z "$self_test_only" ] || continue
    build
    under python -m pytest -q -p no:cacheprovider -o pythonpath=. -o timeout=1800 -s ${TESTS:-tests/backends/cpu} ||
        die "$(cat "$folder/report")"
    [ -z "$(leaks)" ] || die "$(leaks)"
done
