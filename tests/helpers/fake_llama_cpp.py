"""Fake llama-cpp-python: a memory of tokens, and a next token that depends on the last two of them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

VOCABULARY = 5
"""Vocabulary so small that n-gram lookups match often, and are often wrong."""


class State:
    """The memory, the next tokens of the last pass, the tokens of each pass, and the number of freed objects."""

    def __init__(self) -> None:
        self.memory: list[int] = []
        self.rows: list[int] = []
        self.decoded: list[int] = []
        self.freed = 0

    def llama_decode(self, _: Any, batch: Any) -> int:
        length = len(self.memory)
        tokens = list(batch.token[: batch.n_tokens])
        if batch.pos:
            assert batch.pos[: len(tokens)] == [length + n for n in range(len(tokens))], "a hole in the memory"
        self.rows = []
        for token in tokens:
            self.memory.append(token)
            memory_sum = sum(self.memory[-2:-1]) + len(self.memory) // 9
            self.rows.append((3 * token + memory_sum) % VOCABULARY)
        self.decoded.append(len(tokens))
        return 0

    def llama_memory_seq_rm(self, _: Any, sequence: int, start: int, end: int) -> bool:
        assert (sequence, end) == (0, -1) and start <= len(self.memory)
        del self.memory[start:]
        return True

    def llama_sampler_sample(self, _: Any, __: Any, row: int) -> int:
        return self.rows[row]

    def free(self, _: Any) -> None:
        self.freed += 1


def one(tokens: Any, count: int) -> Any:
    return SimpleNamespace(token=tokens, n_tokens=count, pos=None)


def batch(count: int, _: int, __: int) -> Any:
    lists = {name: [0] * count for name in ("token", "pos", "n_seq_id", "logits")}
    return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(count)], **lists)


class Lookup:
    """N-gram lookup that drafts the tokens after the first occurrence of the last token."""

    def __init__(self, num_pred_tokens: int) -> None:
        self.count = num_pred_tokens

    def __call__(self, ids: Any) -> Any:
        at = ids.tolist().index(ids[-1]) + 1
        return ids[at : at + self.count]


def install(patch: pytest.MonkeyPatch) -> State:
    """Install the fake modules where the worker imports them."""
    state = State()

    class Llama:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.ctx = None
            self.n_tokens = 0
            self.input_ids = np.zeros(1000, dtype=np.intc)

        def set_seed(self, seed: int) -> None: ...

        def generate(self, ids: list[int], **_: Any) -> Iterator[int]:
            assert self.input_ids[: self.n_tokens].tolist() == ids[:-1] == state.memory
            token = ids[-1]
            while True:
                state.llama_decode(None, one([token], 1))
                token = state.rows[-1]
                yield token

    def nothing(*_: Any) -> None: ...

    samplers = ("chain_init", "chain_add", "chain_default_params", "init_greedy", "init_temp", "init_dist")
    module = ModuleType("llama_cpp")
    speculative = ModuleType("llama_cpp.llama_speculative")
    vars(module).update(
        {f"llama_sampler_{name}": nothing for name in samplers},
        __version__="0",
        Llama=Llama,
        llama_token=ctypes.c_int32,
        llama_decode=state.llama_decode,
        llama_memory_seq_rm=state.llama_memory_seq_rm,
        llama_sampler_sample=state.llama_sampler_sample,
        llama_batch_init=batch,
        llama_get_memory=nothing,
        llama_sampler_free=state.free,
        llama_print_system_info=lambda: b"CPU : AVX2 = 1 | ",
    )
    vars(speculative).update(LlamaPromptLookupDecoding=Lookup)
    for fake_module in (module, speculative):
        patch.setitem(sys.modules, fake_module.__name__, fake_module)
    return state
