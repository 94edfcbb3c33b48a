"""Runs llama.cpp in an interpreter with its Python package: llama_worker.py WHAT MODEL INPUT OUTPUT.

It imports nothing of triforce, and runs on one thread.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def logits(model: str, texts: str, out: str) -> None:
    """Write the logits (T, V) after each token of each text; texts are lists of ids in a JSON file."""
    prompts = json.loads(Path(texts).read_text())
    options = dict(n_ctx=max(map(len, prompts)), n_batch=512, n_threads=1, n_threads_batch=1, logits_all=True)
    engine = llama_cpp.Llama(model, verbose=False, **options)
    scores = []
    for ids in prompts:
        engine.reset()
        engine.eval(ids)
        scores.append(np.array(engine.scores[: len(ids)]))
    np.savez(out, *scores)


def quantize(model: str, kind: str, out: str) -> None:
    """Write a file of f16 weights as one of another type, such as Q4_K_M."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = 1
    if llama_cpp.llama_model_quantize(model.encode(), out.encode(), ctypes.byref(params)):
        raise SystemExit(f"{model} cannot be quantised to {kind}")


def tokenize(model: str, texts: str, out: str) -> None:
    """Write the ids of texts, a JSON list, and the tokenizer's settings."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    loaded = llama_cpp.llama_model_load_from_file(model.encode(), params)
    if not loaded:
        raise SystemExit(f"{model} cannot be loaded")
    vocab = llama_cpp.llama_model_get_vocab(loaded)
    tokens = range(llama_cpp.llama_vocab_n_tokens(vocab))
    report = {
        "ids": [_ids(vocab, text.encode()) for text in json.loads(Path(texts).read_text())],
        "pieces": [_piece(vocab, token) for token in tokens],
        "eos_ids": [token for token in tokens if llama_cpp.llama_vocab_is_eog(vocab, token)],
        "adds_bos": bool(llama_cpp.llama_vocab_get_add_bos(vocab)),
        "adds_eos": bool(llama_cpp.llama_vocab_get_add_eos(vocab)),
    }
    Path(out).write_text(json.dumps(report))


def _ids(vocab: object, text: bytes) -> list[int]:
    """Return ids of a text. Special tokens are parsed, and none is added."""
    room = (llama_cpp.llama_token * (len(text) + 16))()
    return room[: llama_cpp.llama_tokenize(vocab, text, len(text), room, len(room), False, True)]


def _piece(vocab: object, token: int) -> str:
    """Return the bytes of a token in hexadecimal, "" for special tokens."""
    room = ctypes.create_string_buffer(1 << 16)
    size = llama_cpp.llama_token_to_piece(vocab, token, room, len(room), 0, False)
    return room.raw[:size].hex()


if __name__ == "__main__":
    {"logits": logits, "quantize": quantize, "tokenize": tokenize}[sys.argv[1]](*sys.argv[2:])
