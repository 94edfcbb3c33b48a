"""Digests of the texts of every mode, coupling and dtype: python scripts/digests.py [TRIFORCE] > FILE.

TRIFORCE is the command of the version to measure, by default this environment's. The commit of another version is
recorded as null. Two versions without a change of behaviour have equal digests on one machine. `auto` is measured only
under `seeded`, because its other texts depend on the clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from triforce.cli.bench.setup import about

COMMAND = sys.argv[1] if len(sys.argv) > 1 else str(Path(sys.executable).parent / "triforce")
PROMPT = "".join((Path(__file__).parents[1] / "LICENSE").read_text().split("\n\n")) * 2
MODES = ["ar", "draft", "retrieval", "streaming", "triforce", "ngram", "draft-ngram", "auto"]
COUPLINGS = ["seeded", "rejection", "block"]
DTYPES = ["bfloat16", "float32"]
TEMPERATURES = ["0", "0.8"]
EXTRA_OPTIONS = [
    ["--lower-tiers", "int8"],
    ["--kv-offload", "host"],
    ["--kv-offload", "file"],
    ["--repetition-penalty", "1.2"],
]
"""Options that are measured in mode `triforce` alone."""


def digest(prompt: Path, home: Path, mode: str, *options: str) -> str:
    """Return the SHA-256 digest of the token ids of four texts."""
    command = [COMMAND, "generate", "--prompt-file", str(prompt), "-n", "48", "--n", "4", "--seed", "3", "--json"]
    done = subprocess.run(
        [*command, "--ignore-eos", "--mode", mode, *options],
        capture_output=True, text=True, env=os.environ | {"XDG_CACHE_HOME": str(home)},
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return sha256(json.dumps([answer["token_ids"] for answer in lines]).encode()).hexdigest()


def main() -> None:
    with TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt"
        prompt.write_text(PROMPT)
        digests = about("python scripts/digests.py") | ({"commit": None} if len(sys.argv) > 1 else {})
        for mode, coupling, dtype, temperature in product(MODES, COUPLINGS, DTYPES, TEMPERATURES):
            if mode != "auto" or coupling == "seeded":
                options = ["--coupling", coupling, "--dtype", dtype, "--temperature", temperature]
                digests[" ".join([mode, *options])] = digest(prompt, Path(folder) / "home", mode, *options)
        for options in EXTRA_OPTIONS:
            digests[" ".join(["triforce", *options])] = digest(prompt, Path(folder) / "home", "triforce", *options)
        print(json.dumps(digests, indent=1))


if __name__ == "__main__":
    main()
