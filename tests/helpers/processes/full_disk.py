"""Texts of a tiny pair with a disk cache on a full disk: python full_disk.py PAIR FOLDER.

FOLDER is on a small disk of its own. Prints as JSON whether texts were right, logged lines, tokens restored once there
was room again, and names of remaining files.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from pathlib import Path

from tests.helpers.disk_llm import PROMPT, answer, started
from tests.helpers.tiny_llm import llm
from triforce.disk_cache import prefixes


class Lines(logging.Handler):
    """Handler that records logged lines."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def fill(path: Path) -> None:
    """Write a file until the disk has no room."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def main() -> None:
    prefixes.perf_counter = lambda: 0.0  # reads take no measured time on a busy machine, too
    pair, folder = map(Path, sys.argv[1:])
    lines = Lines()
    cache = folder / "cache"
    logging.getLogger("triforce.disk_cache").addHandler(lines)
    expected_ids = answer(llm(pair), PROMPT, "ar").outputs[0].token_ids
    model = started(pair, cache)
    fill(folder / "filler")
    full = answer(model, PROMPT, "ar").outputs[0].token_ids
    files = sorted(path.name for path in cache.iterdir())
    (folder / "filler").unlink()
    roomy = answer(model, PROMPT, "ar").outputs[0].token_ids
    answer_of_rest = answer(started(pair, cache), PROMPT, "ar")
    texts_equal = full == roomy == answer_of_rest.outputs[0].token_ids == expected_ids
    print(json.dumps({"same": texts_equal, "logged": lines.said, "left": files, "found": answer_of_rest.cached_tokens}))


if __name__ == "__main__":
    main()
