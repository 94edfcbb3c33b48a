"""Launches and bytes of passes, before and after: python -m tests.helpers.cuda.launch_counts

Prints JSON. Of kernels and of torch's own operations on tensors of the meta device, each of which is a launch; views
and memory that is not written to are none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.cuda.launches import (
    BUDGET,
    DRAFTED,
    DRAFTS,
    KEYS,
    META,
    MODELS,
    as_before,
    draft_of,
    empty,
    parts,
    recorded,
    run,
    table,
    target,
)
from triforce.backends.cuda.triton import sampler
from triforce.backends.kernel_api import ForwardBatch, PageTable, pages_for

NAME = "Llama-3.1-8B"
FREE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "_unsafe_view", "alias"}


class Operations(TorchDispatchMode):
    """Names of what torch would launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        there = any(isinstance(each, torch.Tensor) and each.device == META for each in tree_leaves((args, result)))
        name = func.overloadpacket.__name__
        if there and not func.is_view and name not in FREE:
            self.names.append(name)
        return result


def launched(call: Callable[[], object]) -> list[str]:
    """Names of all launches of a call."""
    with recorded() as recorder, Operations() as operations:
        call()
    return [each.kernel.__name__ for each in recorder.launches] + operations.names


def of_a_layer() -> list[str]:
    """Those of the last of two layers in a pass of one token over selected pages."""
    found = []
    for layers in (1, 2):
        decoder, kv = parts(MODELS[NAME], torch.bfloat16, layers)
        own = PageTable(table(layers, 1, MODELS[NAME].kv_heads, pages_for(BUDGET)), [BUDGET - 1], [1])
        found.append(launched(lambda: run(decoder, kv, 1, ForwardBatch([KEYS - 1], [(layers, own)]))))  # noqa: B023
    for name in found[0]:
        found[1].remove(name)
    return found[1]


def of_sampling() -> list[str]:
    """Those of one draw from a draft's logits."""
    B, V = 1, DRAFTS["Llama-68M"].vocab
    some, settings_5B = empty(B, dtype=torch.int64), empty(5, B, dtype=torch.float64)
    asked = sampler.SamplerInputs(empty(B, 1, V), settings_5B, empty(2, B, dtype=torch.int64))
    return launched(lambda: sampler.by_race(asked, some, some))


def sums(width: int) -> float:
    """Bytes of the sums of splits, written and read, as a share of those of keys and values."""
    with recorded() as recorder:
        target(MODELS[NAME], width)
    splits = next(each for each in recorder.launches if each.kernel.__name__ == "_splits")
    names = [parameter.name for parameter in splits.kernel.params]
    sums_BGNRD, keys_GSD = (splits.arguments[names.index(name)] for name in ("parts", "keys"))
    return 2 * 4 * sums_BGNRD.numel() / (2 * 2 * KEYS * len(keys_GSD) * keys_GSD.shape[2])


def counts() -> dict[str, tuple[Any, Any]]:
    """Of each thing its value before and after."""
    both = []
    for how in (as_before(), nullcontext()):
        with how:
            layer, draws = of_a_layer(), of_sampling()
            both.append((layer, draws, len(launched(draft_of(DRAFTS["Llama-68M"], True))), sums(8)))
    (layer, draws, draft, share), (layer_now, draws_now, draft_now, share_now) = both
    products = [sum(name in ("mm", "addmm", "linear") for name in each) for each in (layer, layer_now)]
    return {
        f"launches of a layer of {NAME}, width 1": (len(layer), len(layer_now)),
        "products of weights among them": (products[0], products[1]),
        "launches of a draw from 32,000 tokens": (len(draws), len(draws_now)),
        f"draws launched by the host, in a draft of {DRAFTED} tokens": (DRAFTED * len(draws), 0),
        f"graphs and other launches of a draft of {DRAFTED} tokens": (DRAFTED * (1 + len(draws)), 1),
        f"launches in the graph of a draft of {DRAFTED} tokens, Llama-68M": (draft, draft_now),
        "sums of splits, width 8, of the bytes of keys and values": (f"{share:.1%}", f"{share_now:.1%}"),
    }


if __name__ == "__main__":
    print(json.dumps(counts()))
