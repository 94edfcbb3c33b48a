"""Fake ik-llama-cpp-python: a memory of tokens for each context, by number, with the next tokens of fake llama.cpp."""

from __future__ import annotations

import ctypes
import sys
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.helpers.fake_llama_cpp import VOCABULARY, State, batch


def install(patch: pytest.MonkeyPatch) -> dict[int, State]:
    """Install the fake modules where the worker imports them. Returns the memories; the target's has number 1."""
    states: dict[int, State] = {}
    numbers = count(1)

    def init(model: int, params: Any) -> int:
        states[model] = State()
        return model

    def logits(context: int, place: int) -> Any:
        row = [0.0] * VOCABULARY
        row[states[context].rows[place]] = 1.0
        numbers_array = (ctypes.c_float * VOCABULARY)(*row)
        return ctypes.cast(numbers_array, ctypes.POINTER(ctypes.c_float))

    def forget(context: int, *span: int) -> bool:
        return states[context].llama_memory_seq_rm(None, *span)

    def system_info() -> bytes:
        return b"AVX2 = 1 | AVX512 = 0 | "

    package = ModuleType("ik_llama_cpp")
    api = ModuleType("ik_llama_cpp._ctypes_api")
    vars(api).update(
        _lib=SimpleNamespace(llama_kv_cache_seq_rm=forget, llama_print_system_info=system_info),
        llama_backend_init=lambda: None,
        llama_model_default_params=SimpleNamespace,
        llama_context_default_params=SimpleNamespace,
        llama_model_load_from_file=lambda file, params: next(numbers) if b"broken" not in file else None,
        llama_init_from_model=init,
        llama_model_get_vocab=lambda model: model,
        llama_vocab_n_tokens=lambda vocab: VOCABULARY,
        llama_batch_init=batch,
        llama_decode=lambda context, tokens: states[context].llama_decode(None, tokens),
        llama_get_logits_ith=logits,
    )
    vars(package).update(__version__="0", _ctypes_api=api)
    for fake_module in (package, api):
        patch.setitem(sys.modules, fake_module.__name__, fake_module)
    return states
