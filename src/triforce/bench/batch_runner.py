"""Several texts made together, from prompts whose KV was saved; and the saved prompts themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

from triforce.engine.engine import Request
from triforce.engine.sequence_group import OnPrefill
from triforce.errors import CacheError
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache.prompt_file import SavedCache
from triforce.llm import LLM


def together(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, mode: str, earlier: SavedCache | None = None
) -> RequestOutput:
    """The texts of all prompts, one row each, as the choices of one output: its seconds are those of all together.

    All rows are read before the first token is drawn, and row n draws by the seed of `params` and n.
    """
    requests = [
        llm.request(prompt, replace(params, seed=(params.seed or 0) + n), mode) for n, prompt in enumerate(prompts)
    ]
    whole = Request(prompts[0], [request.streams[0] for request in requests], mode, llm.coupling)
    texts = llm.open(len(prompts), sum(len(prompt) + params.max_tokens for prompt in prompts))
    try:
        texts.submit([whole], saved=earlier)
        return texts.finish(whole)
    finally:
        texts.close()


def varied(llm: LLM, coupling: str | None = None, **speculation: Any) -> LLM:
    """The same models under another coupling, or another way to speculate (fields of `SpeculativeConfig`)."""
    other = object.__new__(type(llm))  # a copy of an LLM is refused, as two would share what one of them closes
    vars(other).update(vars(llm))
    other.coupling, other.speculation = coupling or llm.coupling, replace(llm.speculation, **speculation)
    other.runner = llm.runner.varied(other.speculation, other.coupling)
    return other


class Prompts:
    """KV of prompts, in files of a folder: read once, and loaded by whoever begins alike."""

    def __init__(self, llm: LLM, folder: Path, on_prefill: Callable[[], OnPrefill]) -> None:
        self.llm, self.folder, self.on_prefill = llm, folder, on_prefill

    def of(self, name: str, prompt: list[int]) -> tuple[SavedCache, float]:
        """The saved KV of a prompt, and at how many tokens a second it was read; read again if it is another one."""
        kv, about, key = self.folder / f"{name}.kv", self.folder / f"{name}.json", crc32(repr(prompt).encode())
        if not self._fits(kv) or _saved(about)[0] != key:
            short = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            (first,) = self.llm.generate([prompt], short, mode="ar", save_cache=kv, on_prefill=self.on_prefill())
            about.write_text(json.dumps([key, (len(prompt) - 1) / first.prefill_seconds]), encoding="utf-8")
        return self._opened(kv), _saved(about)[1]

    def _opened(self, kv: Path) -> SavedCache:
        pool = self.llm.open(1, 1).core.store.pool
        return SavedCache(kv, self.llm.runner.cache_fingerprint(pool))

    def _fits(self, kv: Path) -> bool:
        """Whether a file is there that is of this model, with this draft."""
        try:
            return kv.exists() and bool(self._opened(kv))
        except CacheError:
            return False

    def drop(self, name: str) -> None:
        """Delete the saved prompt."""
        for suffix in ("kv", "json"):
            (self.folder / f"{name}.{suffix}").unlink(missing_ok=True)


def _saved(about: Path) -> tuple[int, float]:
    """Return a saved prompt's identity and its tokens/s; a value that no prompt has where there is no file."""
    try:
        key, rate = json.loads(about.read_text(encoding="utf-8"))
        return int(key), float(rate)
    except (OSError, ValueError, TypeError):
        return -1, 0.0
