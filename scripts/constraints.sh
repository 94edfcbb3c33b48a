#!/bin/sh
# Prints the versions that scripts/install.sh takes: those of constraints.txt. Usage: scripts/constraints.sh [gpu]; with
# gpu those of constraints-gpu.txt take the place of the ones that they name.
set -eu
cd "$(dirname "$0")/.."

if [ "${1:-}" = gpu ]; then
    awk -F == 'FNR == NR { if (NF == 2) own[$1] = $0; next } $1 in own { print own[$1]; next } { print }' \
        constraints-gpu.txt constraints.txt
else
    cat constraints.txt
fi
