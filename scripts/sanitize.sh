#!/bin/sh
# Runs the tests of the native kernels under sanitizers, from a copy of the package, once it has shown that they find
# planted bugs. Usage: scripts/sanitize.sh [--self-test] [KIND...]; `python` is the environment's, TESTS what to run.
# A kind is what -fsanitize takes: by default first address,undefined and then thread.
set -eu
cd "$(dirname "$0")/.."
compiler=${CXX:-g++}
self_test_only=
if [ "${1:-}" = --self-test ]; then self_test_only=yes && shift; fi
[ $# -gt 0 ] || set -- address,undefined thread

# A command with the runtime of the sanitizers in it before Python starts, which is not built for them; libstdc++ too, or
# they could not see exceptions. Leaks are not looked for: at its end Python leaves most of its memory to the system, and
# a leak of ours is called by Python too, so that no list of exceptions tells one from the other.
# TSan sees the locks of Python and torch, but not their memory, of which it could say nothing right; test_threads.py
# forks beside threads.
under() {
    LD_PRELOAD="$("$compiler" -print-file-name="$runtime") $("$compiler" -print-file-name=libstdc++.so.6)" \
        ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
        TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1:die_after_fork=0 \
        OMP_NUM_THREADS=1 PYTHONPATH="$PWD/$folder/package" "$@"
}

die() {
    printf '%s\n' "$*" >&2
    exit 1
}

call_planted() { under python -c "import ctypes; ctypes.CDLL('$PWD/$folder/planted.so').$1()" >"$folder/planted.log" 2>&1; }

must_find() { # BUG WORDS
    if call_planted "$1"; then die "-fsanitize=$kind does not find the planted bug $1"; fi
    grep -q "$2" "$folder/planted.log" || die "-fsanitize=$kind fails for another reason than $1: $(cat "$folder/planted.log")"
}

self_test() {
    "$compiler" -std=c++17 -g -O1 -fPIC -shared -pthread -fsanitize="$kind" -fno-sanitize-recover=undefined \
        tests/native/planted.cpp -o "$folder/planted.so"
    call_planted nothing || die "-fsanitize=$kind fails where nothing is wrong: $(cat "$folder/planted.log")"
    case $kind in *address*)
        must_find out_of_bounds heap-buffer-overflow
        must_find use_after_free heap-use-after-free ;;
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
    rm -f "$folder"/package/triforce/kernels/_native.*.so
    cmake -S . -B "$folder/cmake" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DPython_EXECUTABLE="$(command -v python)" -DTRIFORCE_SANITIZE="$kind" ${levels:+-DTRIFORCE_LEVELS="$levels"} \
        -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$folder/package/triforce/kernels"
    cmake --build "$folder/cmake"
}

for kind; do
    folder=build/sanitize-$(echo "$kind" | tr , -)
    mkdir -p "$folder"
    case $kind in
        thread) runtime=libtsan.so levels=portable ;; # above the levels, all of them share the work out alike
        *) runtime=libasan.so levels= ;;
    esac
    self_test
    [ -z "$self_test_only" ] || continue
    build
    under python -m pytest -q -p no:cacheprovider -o pythonpath=. -o timeout=1800 ${TESTS:-tests/kernels}
done
