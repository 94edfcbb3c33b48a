#!/bin/sh
# Prints the versions of packages that scripts/install.sh installs. Usage: scripts/constraints.sh [gpu].
# These are the versions of constraints.txt; with `gpu`, versions of constraints-gpu.txt replace those of the same packages.
set -eu
cd "$(dirname "$0")/.."

if [ "${1:-}" = gpu ]; then
    awk -F == 'FNR == NR { if (NF == 2) own[$1] = $0; next } $1 in own { print own[$1]; next } { print }' \
        constraints-gpu.txt constraints.txt
else
    cat constraints.txt
fi
