"""ik_llama.cpp, by the C functions of ik-llama-cpp-python, on a GGUF file.

Settings: `repack`, its faster order of weights in memory, `flash`, `ubatch` and `kv`, a type of ggml. A turn's is
`lookup` or `draft`, a number of draft tokens from the prompt or from the task's draft model, or `width`, of passes to
be timed. The package has no speculation and draws in Python, number by number: here numpy looks up and draws.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.compare.gguf_file import gguf_of
from benchmarks.compare.workers.clock import Generate, Task, Turn, common_tokens
from benchmarks.compare.workers.token_loop import BATCH, Draw, Proposer, TokenLoop

NGRAM = 3
"""Tokens at most that a lookup compares."""


def load(task: Task) -> Generate:
    return IkLlamaCpp(task, gguf_of(task)).generate


class IkLlamaCpp(TokenLoop):
    """file: of the model, which is the task's or its draft. Raises ValueError if it cannot be read."""

    def __init__(self, task: Task, file: Path) -> None:
        import ik_llama_cpp
        from ik_llama_cpp import _ctypes_api as api

        self._task = task
        self._draft: DraftModel | None = None
        self._forget, system_info = api._lib.llama_kv_cache_seq_rm, api._lib.llama_print_system_info
        self._forget.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
        system_info.restype = ctypes.c_char_p
        api.llama_backend_init()
        model = api.llama_model_load_from_file(bytes(file), _model_settings(api, task))
        context = model and api.llama_init_from_model(model, _context_settings(api, task))
        if not context:
            raise ValueError(f"it cannot read {file}")
        self._vocabulary: int = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        super().__init__(api, context, ik_llama_cpp.__version__, system_info().decode())

    def forget(self, length: int) -> None:
        self._forget(self.context, 0, length, -1)

    @contextmanager
    def drawing(self, turn: Turn) -> Iterator[Draw]:
        """Take the likeliest token, or at a temperature draw from all of them."""
        import numpy as np

        generator = np.random.default_rng(turn["seed"])

        def draw(place: int) -> int:
            logits_V = self.logits(place)
            if turn["temperature"]:
                logits_V = logits_V / turn["temperature"] + generator.gumbel(size=len(logits_V))
            return int(logits_V.argmax())

        yield draw

    def logits(self, place: int) -> Any:
        """Return the logits of a scored token, by its place in the last pass."""
        import numpy as np

        return np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.context, place), (self._vocabulary,))

    def proposing(self, turn: Turn) -> Proposer:
        settings = turn["settings"]
        if "lookup" in settings:
            return partial(looked_up, count=settings["lookup"])
        if self._draft is None:
            self._draft = DraftModel(IkLlamaCpp(self._task, Path(self._task["draft"])))
        return partial(self._draft.propose, count=settings["draft"])


class DraftModel:
    """A draft model with the text that its KV is of."""

    def __init__(self, model: IkLlamaCpp) -> None:
        self._model = model
        self._read = list[int]()

    def propose(self, text: Any, count: int) -> list[int]:
        """Return its `count` likeliest tokens behind a text, each after the ones before."""
        model = self._model
        length = common_tokens(self._read, {"ids": text.tolist(), "fresh": False})
        model.forget(length)
        unread = text[length:].tolist()
        draft_tokens = list[int]()
        while len(draft_tokens) < count:
            for start in range(0, len(unread), BATCH):
                model.decode(unread[start : start + BATCH], length + start, scored=1)
            length += len(unread)
            unread = [int(model.logits(-1).argmax())]
            draft_tokens += unread
        self._read = [*text.tolist(), *draft_tokens[:-1]]
        return draft_tokens


def looked_up(text: Any, count: int) -> list[int]:
    """Return the `count` tokens behind the last place that ends like the text: in `NGRAM` tokens, or else in fewer."""
    import numpy as np

    for size in range(min(NGRAM, len(text) - 1), 0, -1):
        grams = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
        places = np.flatnonzero((grams == text[-size:]).all(axis=1))
        if len(places):
            start = int(places[-1]) + size
            return list(map(int, text[start : start + count]))
    return []


def _model_settings(api: Any, task: Task) -> Any:
    params = api.llama_model_default_params()
    params.repack_tensors = task["settings"]["repack"]
    params.use_mmap = not params.repack_tensors  # as its own programs do
    return params


def _context_settings(api: Any, task: Task) -> Any:
    settings = task["settings"]
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = task["positions"], BATCH, settings["ubatch"]
    params.n_threads = params.n_threads_batch = task["threads"]
    params.flash_attn = settings["flash"]
    if "kv" in settings:
        params.type_k = params.type_v = settings["kv"]
    return params
