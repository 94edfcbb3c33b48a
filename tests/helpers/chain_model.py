"""Chain models: tiny GGUF files whose weights write one chosen text behind a prompt's last token.

Embedding and head make each token follow the one before it. A token that stands in the text several times has another
successor each time: a head of attention tells whether a token between two places has been written, and a gate whether
the token at hand is the last one. A piece of text is
one token, which the tokenizer has no merges for, so no prompt contains it; a prompt is bytes and marks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.gguf_files import write_gguf
from triforce.checkpoint.tokenizer import _byte_alphabet

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
HEADS = 8
"""Heads of attention: the number of places that can be told apart."""
GATES = 32
SHARPNESS = 40.0
LOGIT = 20.0
GATE = 10.0
PLACE_GROWTH = 10.0
"""Each further place of a token has a successor with a logit that many times as large."""


def write_chain(
    folder: Path, text: str, marks: Sequence[str], template: str, last: str, plain_marks: Sequence[str] = ()
) -> Path:
    """Write a model that continues a prompt whose last token is `last` with a text, and return the file.

    marks: special tokens. plain_marks: tokens that are shown as text, as `<tool_call>` of Qwen. template: of chats.
    """
    names = [*marks, *plain_marks]
    pieces = _pieces(text, names)
    byte_names = {byte: name for name, byte in _byte_alphabet().items()}
    spelled = {
        piece: "".join(byte_names[byte] for byte in piece.encode())
        for piece in pieces
        if piece not in names and len(piece.encode()) > 1
    }
    merged = byte_names[0], byte_names[1]  # a file must have a merge
    tokens = ["<s>", "</s>", *byte_names.values(), "".join(merged), *names, *spelled.values()]
    kinds = [CONTROL] * 2 + [NORMAL] * 257 + [CONTROL] * len(marks) + [USER_DEFINED] * len(plain_marks)
    kinds += [NORMAL] * len(spelled)
    ids = {name: i for i, name in enumerate(tokens)}
    chain = [ids[last if last in names else byte_names[last.encode()[0]]]]
    chain += [
        ids[spelled.get(piece, byte_names.get(ord(piece), piece) if len(piece) == 1 else piece)] for piece in pieces
    ]
    values: dict[str, Any] = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 8192,
        "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": HEADS,
        "llama.rope.freq_base": 1e12, "llama.feed_forward_length": GATES,
        "llama.attention.layer_norm_rms_epsilon": 1e-6, "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merged)], "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1, "tokenizer.chat_template": template,
    }  # fmt: skip
    tensors = _weights([*chain, 1], len(tokens))
    width = tensors["token_embd.weight"].shape[1]
    values |= {"llama.embedding_length": width, "llama.rope.dimension_count": width // HEADS}
    return write_gguf(folder / "chain.gguf", values, tensors)


def _pieces(text: str, names: Sequence[str]) -> list[str]:
    """Return a text as marks and pieces. No piece stands in it twice, but single characters, which are bytes."""
    pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
    pieces: list[str] = []
    for part in re.split(f"({pattern})", text):
        while part and part not in names:
            size = next(size for size in range(min(len(part), 24), 0, -1) if part[:size] not in pieces or size == 1)
            pieces.append(part[:size])
            part = part[size:]
        pieces += [part] if part else []
    return pieces


def _weights(chain: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """Return the tensors of a model in which each token of a chain follows the one before it."""
    width = -(-(vocab_size + 2 * HEADS) // 256) * 256
    head_dim = width // HEADS
    embedding = np.zeros((vocab_size, width), np.float32)
    embedding[:, :vocab_size] = np.eye(vocab_size)
    head = np.zeros((vocab_size, width), np.float32)
    query, key, value, output = (np.zeros((width, width), np.float32) for _ in range(4))
    gate, up = (np.zeros((GATES, width), np.float32) for _ in range(2))
    down = np.zeros((width, GATES), np.float32)
    unit = np.sqrt(width)  # of a one-hot row after its norm
    rule = 0
    last_places: dict[int, int] = {}
    for place, (token, successor) in enumerate(pairwise(chain)):
        if token not in last_places:
            head[successor, token] = 1
        elif successor != chain[last_places[token] + 1]:
            between = chain[last_places[token] + 1 : place]
            witness = next(other for other in between if chain.count(other) == 1)
            row = rule * head_dim
            query[row + head_dim - 2, :vocab_size] = 1 / unit
            key[row + head_dim - 2, witness] = SHARPNESS * np.sqrt(head_dim) / unit
            value[row, witness] = 1 / unit
            output[vocab_size + rule, row] = 1  # 1 if the witness has been written, else 0
            gate[rule, :vocab_size] = -1.5 * GATE  # open if it has, and the token is the last one
            gate[rule, token] += GATE
            gate[rule, vocab_size + rule] = GATE
            up[rule, :vocab_size] = 1
            down[vocab_size + HEADS + rule, rule] = 2 / (GATE * width)
            head[successor, vocab_size + HEADS + rule] = 2 * PLACE_GROWTH ** (rule + 1)
            rule += 1
        last_places[token] = place
    ones = np.ones(width, np.float32)
    return {
        "token_embd.weight": embedding, "output.weight": LOGIT * head, "output_norm.weight": ones,
        "blk.0.attn_norm.weight": ones, "blk.0.ffn_norm.weight": ones, "blk.0.attn_q.weight": query,
        "blk.0.attn_k.weight": key, "blk.0.attn_v.weight": value, "blk.0.attn_output.weight": output,
        "blk.0.ffn_gate.weight": gate, "blk.0.ffn_up.weight": up, "blk.0.ffn_down.weight": down,
    }  # fmt: skip
