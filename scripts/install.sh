#!/bin/sh
# Makes .venv, and installs triforce into it. Usage: scripts/install.sh [dev | test]; PYTHON names the interpreter.
# torch comes along for developers, with an NVIDIA driver (the versions of torch and Triton that ran on a GPU), and where
# the kernels do not compile. `test` makes .venv-core, with what the tests need that need no torch.
set -eu
cd "$(dirname "$0")/.."

CPU_INDEX=https://download.pytorch.org/whl/cpu
VENV=.venv
if [ "${1:-}" = test ]; then VENV=.venv-core; fi
CONSTRAINTS=$VENV/constraints.txt

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
    if $VENV/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then return; fi
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "This Python $version has no venv module. Get it with: sudo apt install python$version-venv (Debian, Ubuntu)," \
            "or name another interpreter: make install PYTHON=/path/to/python3"
    say "Making $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV"
    pip uninstall -qq --yes setuptools # Python 3.11 puts it there; a package that needs it brings it
}

pip() { $VENV/bin/python -m pip --disable-pip-version-check "$@"; }

has_nvidia_driver() {
    [ -e /proc/driver/nvidia/version ] || [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null 2>&1
}

# Writes the versions to install to $CONSTRAINTS, and sets TORCH to the version of torch.
choose_versions() {
    if [ "$(uname -s)" = Linux ] && has_nvidia_driver; then
        scripts/constraints.sh gpu >"$CONSTRAINTS"
        GPU=gpu
    else
        scripts/constraints.sh >"$CONSTRAINTS"
        GPU=
    fi
    TORCH=$(grep '^torch==' "$CONSTRAINTS")
}

# Returns 0 if pip can reach PyTorch's CPU build. An index that is out of reach takes a few seconds.
reach_cpu_build() {
    say "No NVIDIA driver here: looking for PyTorch's CPU build (200 MB in place of 3 GB)"
    pip install --dry-run --no-deps --quiet --timeout 5 --retries 0 --index-url "$CPU_INDEX" "$TORCH+cpu" >/dev/null 2>&1
}

install_torch() {
    if $VENV/bin/python -c "import sys, importlib.metadata as m; sys.exit(m.version('torch').split('+')[0] != '${TORCH#*==}')" 2>/dev/null; then return; fi
    if [ "$(uname -s)" != Linux ]; then
        say "Downloading $TORCH: about 100 MB"
    elif has_nvidia_driver; then
        say "Downloading $TORCH with CUDA: about 3 GB"
    elif reach_cpu_build; then
        say "Downloading $TORCH for the CPU: about 200 MB"
        if pip install -qq --no-deps --index-url "$CPU_INDEX" "$TORCH+cpu"; then return; fi
        say "That failed. Downloading $TORCH from the package index: about 3 GB, because it includes CUDA"
    else
        say "The CPU build is out of reach. Downloading $TORCH from the package index: about 3 GB, because it includes CUDA"
    fi
    pip install -qq --constraint "$CONSTRAINTS" "$TORCH"
}

has_compiler() {
    for compiler in ${CXX:-} c++ g++ clang++; do
        if command -v "$compiler" >/dev/null 2>&1; then return; fi
    done
    return 1
}

has_kernels() { ls src/triforce/backends/cpu/_native.*.so >/dev/null 2>&1; }

COMPILER_ADVICE="sudo apt install g++ (Debian, Ubuntu), sudo dnf install gcc-c++ (Fedora), xcode-select --install (macOS); \
then: rm .venv/.user, and make install again."

# Prints the packages that triforce and some of its extras ask for. Usage: requirements "EXTRA ..."
requirements() {
    $VENV/bin/python - "$1" <<'PYTHON'
import re, sys, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = sys.argv[1].split()
texts = list(project["dependencies"])
for extra in extras:  # the list grows
    for text in project["optional-dependencies"][extra]:
        own = re.fullmatch(r"triforce\[(.*)\]", text)
        extras += [name for name in own[1].split(",") if name not in extras] if own else []
        texts += [] if own else [text]
print("\n".join(texts))
PYTHON
}

# Usage: download "EXTRA ..." MEGABYTES [OPTION]; OPTION is passed to pip.
download() {
    say "Downloading triforce's packages${1:+ ($1)}: about $2 MB"
    began=$(date +%s)
    requirements "$1" >$VENV/requirements.txt
    pip install -qq ${3:-} --constraint "$CONSTRAINTS" --requirement $VENV/requirements.txt
    say "  $(($(date +%s) - began)) s"
}

compile() {
    say "Compiling the kernels: minutes on two cores"
    began=$(date +%s)
    pip install -qq --no-deps --editable .
    say "  $(($(date +%s) - began)) s"
}

# Writes the byte code of modules that commands import. pip would write that of all modules, which is four times as large.
write_bytecode() {
    modules="numpy.random, tqdm, triforce.backends.cpu.model, triforce.cli.chat.terminal, triforce.cli.generate"
    env -u PYTHONDONTWRITEBYTECODE $VENV/bin/python -c "import $modules, triforce.server.service"
}

make_venv
choose_versions
if [ "${1:-}" = test ]; then # with the kernels of .venv
    download test 150
    pip install -qq --no-deps --config-settings wheel.cmake=false --config-settings wheel.py-api= --editable .
    exit
fi
if [ "${1:-}" = dev ]; then
    install_torch
    download "dev${GPU:+ $GPU}" 500
elif has_nvidia_driver; then
    install_torch
    download "$GPU" 60
else
    download "" 60 --no-compile
fi
compile
if has_kernels; then
    write_bytecode
else
    if has_compiler; then say "The kernels did not compile."; else say "There is no C++ compiler here: $COMPILER_ADVICE"; fi
    say "Without kernels torch computes, several times slower."
    install_torch
    pip install -qq --constraint "$CONSTRAINTS" array-api-compat
fi
say "Done: $VENV/bin/triforce"
