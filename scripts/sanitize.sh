#!/bin/sh
# Runs the tests of the native kernels under sanitizers, from a copy of the package. Usage: scripts/sanitize.sh [KIND...]
# A kind is what -fsanitize takes: by default first address,undefined and then thread.
set -eu
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- address,undefined thread

for kind; do
    folder=build/sanitize-$(echo "$kind" | tr , -)
    mkdir -p "$folder/package/triforce"
    rm -rf "$folder/package/triforce"
    cp -r src/triforce "$folder/package/triforce"
    rm -f "$folder"/package/triforce/kernels/_native.*.so
    cmake -S . -B "$folder/cmake" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DPython_EXECUTABLE="$PWD/.venv/bin/python" -DTRIFORCE_SANITIZE="$kind" \
        -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$folder/package/triforce/kernels"
    cmake --build "$folder/cmake"
    case $kind in thread) runtime=libtsan.so ;; *) runtime=libasan.so ;; esac
    # Python leaks by design, and torch has threads and memory that no sanitizer has seen.
    LD_PRELOAD=$("${CXX:-g++}" -print-file-name=$runtime) OMP_NUM_THREADS=1 \
        ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
        TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1 \
        .venv/bin/python -m pytest -q -p no:cacheprovider -o "pythonpath=$folder/package ." -o timeout=1800 tests/kernels
done
