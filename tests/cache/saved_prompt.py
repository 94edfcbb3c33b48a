"""A prompt, and what makes a saved one of it."""

from __future__ import annotations

from pathlib import Path

from tiny_llm import ids

from triforce.cache import saved

MAKER = saved.Maker("fingerprint of a model", "kernels")
PROMPT = ids(150)


def loaded(path: Path) -> saved.SavedCache:
    return saved.SavedCache(path, MAKER)
