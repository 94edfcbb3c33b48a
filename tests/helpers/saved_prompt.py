"""A prompt, and the parts of its saved form."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.tiny_llm import ids
from triforce.disk_cache import prompt_file

MAKER = prompt_file.CacheFingerprint("fingerprint of a model", "kernels")
PROMPT = ids(150)


def loaded(path: Path) -> prompt_file.SavedCache:
    return prompt_file.SavedCache(path, MAKER)
