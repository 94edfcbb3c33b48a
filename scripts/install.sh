#!/bin/sh
# Makes .venv and installs triforce into it, torch first. Usage: scripts/install.sh [dev]; PYTHON names the interpreter.
# With an NVIDIA driver it takes the pair of torch and Triton that ran on a GPU.
set -eu
cd "$(dirname "$0")/.."

CPU_INDEX=https://download.pytorch.org/whl/cpu
CONSTRAINTS=.venv/constraints.txt

say() { printf '%s\n' "$*"; }
die() {
    printf '%s\n' "$@" >&2
    exit 1
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            say "$candidate"
            return
        fi
    done
    die "triforce needs Python 3.11 or newer; looked for ${PYTHON:-python3, python3.11 and later} and found none." \
        "Get it with: sudo apt install python3.11 python3.11-venv (Debian, Ubuntu), sudo dnf install python3.11 (Fedora)," \
        "brew install python@3.11 (macOS), or from https://www.python.org/downloads/; then run make install again," \
        "with PYTHON=/path/to/python3.11 if it is not on the PATH."
}

make_venv() {
    if .venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then return; fi
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "This Python $version has no venv module. Get it with: sudo apt install python$version-venv (Debian, Ubuntu)," \
            "or name another interpreter: make install PYTHON=/path/to/python3"
    say "Making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
}

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

has_nvidia_driver() {
    [ -e /proc/driver/nvidia/version ] || [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null 2>&1
}

# The versions to take, and the one of torch among them.
choose_versions() {
    if [ "$(uname -s)" = Linux ] && has_nvidia_driver; then
        scripts/constraints.sh gpu >"$CONSTRAINTS"
        GPU=,gpu
    else
        scripts/constraints.sh >"$CONSTRAINTS"
        GPU=
    fi
    TORCH=$(grep '^torch==' "$CONSTRAINTS")
}

# PyTorch's CPU build, if pip can reach one; an index out of reach costs seconds.
reach_cpu_build() {
    say "No NVIDIA driver here: looking for PyTorch's CPU build (200 MB in place of 3 GB)"
    pip install --dry-run --no-deps --quiet --timeout 5 --retries 0 --index-url "$CPU_INDEX" "$TORCH+cpu" >/dev/null 2>&1
}

install_torch() {
    if .venv/bin/python -c "import sys, importlib.metadata as m; sys.exit(m.version('torch').split('+')[0] != '${TORCH#*==}')" 2>/dev/null; then return; fi
    if [ "$(uname -s)" != Linux ]; then
        say "Downloading $TORCH: about 100 MB"
    elif has_nvidia_driver; then
        say "Downloading $TORCH with CUDA: about 3 GB"
    elif reach_cpu_build; then
        say "Downloading $TORCH for the CPU: about 200 MB"
        if pip install -qq --no-deps --index-url "$CPU_INDEX" "$TORCH+cpu"; then return; fi
        say "That failed; taking the build of the package index instead: about 3 GB, as it carries CUDA"
    else
        say "Not within reach. Downloading $TORCH from the package index: about 3 GB, as it carries CUDA"
    fi
    pip install -qq --constraint "$CONSTRAINTS" "$TORCH"
}

install_triforce() {
    say "Downloading what triforce needs beside torch, about $2 MB, and compiling its kernels: a minute or two"
    pip install -qq --constraint "$CONSTRAINTS" --editable "$1"
    if ! ls src/triforce/backends/cpu/_native.*.so >/dev/null 2>&1; then
        say "The kernels did not compile; triforce works without them, several times slower. A C++ compiler is needed:" \
            "sudo apt install g++ (Debian, Ubuntu), sudo dnf install gcc-c++ (Fedora), xcode-select --install (macOS);" \
            "then: rm .venv/.user, and make install again."
    fi
}

make_venv
choose_versions
install_torch
if [ "${1:-}" = dev ]; then install_triforce ".[dev,serve$GPU]" 530; else install_triforce ".[serve$GPU]" 70; fi
say "Done: .venv/bin/triforce"
