#!/bin/sh
# Builds sdist and wheel into dist/, installs the wheel into an empty environment, and runs the demo there.
# Usage: scripts/release.sh. The `python` on the PATH must have the packages of `make install-dev`. Variables of pip apply.
set -eu
cd "$(dirname "$0")/.."

CPU_INDEX=https://download.pytorch.org/whl/cpu
TORCH=$(grep '^torch==' constraints.txt)
EMPTY=build/release

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/triforce/__init__.py)
grep -q "^## \[$version\]" CHANGELOG.md || { echo "CHANGELOG.md has no section [$version]" >&2; exit 1; }

mkdir -p dist build
rm -rf "dist/triforce-$version"* "$EMPTY"
python -c "import scikit_build_core.build as backend; print(backend.build_sdist('dist'))"
python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir dist "dist/triforce-$version.tar.gz"

python -m venv "$EMPTY"
pip() { "$EMPTY/bin/python" -m pip --disable-pip-version-check "$@"; }
if ! pip install --quiet --no-deps --timeout 5 --retries 0 --index-url "$CPU_INDEX" "$TORCH+cpu" 2>/dev/null; then
    echo "PyTorch's CPU build is out of reach; installing the build of the package index"
fi
pip install --quiet --constraint constraints.txt "dist/triforce-$version"-*.whl
(cd "$EMPTY" && bin/triforce --version && bin/triforce demo)
ls -l dist
