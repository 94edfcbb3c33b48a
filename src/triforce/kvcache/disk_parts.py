"""Parts of an entry of the disk cache: KV, hidden states and token ids, and back. Shape suffixes: L layers, N slots."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from triforce.disk_cache.entry import Entry, Part
from triforce.kvcache.feature_memory import FEATURES, FeatureMemory, FeatureSlots
from triforce.kvcache.views.full import LayerKV
from triforce.ragged import Ints

IDS = "ids"
"""The name of token ids in an entry."""
KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8"}


LAYERS, WINDOWS = ("keys", "values"), ("window_keys", "window_values")
"""Names of K and V of layers, and of those whose pages are apart, as they have a window."""


def parts_of(layers: Sequence[LayerKV], names: tuple[str, str] = LAYERS) -> dict[str, Part]:
    """Copy K and V of some layers, (G, N, D) each, to parts of an entry; of none there are no parts."""
    return {name: part_of([layer[i] for layer in layers]) for i, name in enumerate(names) if layers}


def part_of(layers: Sequence[Tensor]) -> Part:
    """Copy tensors (G, N, D) of all layers to one part of an entry."""
    whole_LGND = torch.empty(len(layers), *layers[0].shape, dtype=layers[0].dtype)
    for layer, each in enumerate(layers):
        whole_LGND[layer].copy_(each)
    return Part(KINDS[whole_LGND.dtype], whole_LGND.shape, whole_LGND.flatten().view(torch.uint8).numpy().data)


def layers_of(
    entry: Entry, shape: Sequence[int], dtype: torch.dtype, names: tuple[str, str] = LAYERS
) -> list[LayerKV] | None:
    """Return K and V of each layer of an entry, (G, N, D); None unless all of it has this shape (LGND) and dtype."""
    if not shape[0]:
        return []
    keys, values = (_tensor(entry, name, shape, dtype) for name in names)
    return None if keys is None or values is None else list(zip(keys, values, strict=True))


def ids_part(ids: Ints) -> Part:
    """Copy token ids to a part of an entry."""
    return Part("I64", ids.shape, memoryview(bytearray(ids.tobytes())))


def ids_of(entry: Entry) -> Ints | None:
    """Return the token ids that an entry of whole pages holds; None unless there are some."""
    part = entry.parts.get(IDS)
    if part is None or part.kind != "I64" or len(part.shape) != 1:
        return None
    return np.frombuffer(part.data, dtype=np.int64)


def seconds_of(entry: Entry) -> float:
    """Return the seconds that a prefill took for a token of an entry; 0 where it does not say so."""
    try:
        seconds = float(entry.facts["seconds_per_token"])
    except (KeyError, ValueError):
        return 0.0
    return seconds if isfinite(seconds) else 0.0


def features_of(entry: Entry, features: FeatureMemory, tokens: int) -> FeatureSlots | None:
    """Return what a feature draft held of so many tokens of an entry; None unless it has their shape and dtype."""
    shapes = zip(FEATURES, features.shapes(tokens), strict=True)
    keys, values, states = (_tensor(entry, name, (1, *shape), features.dtype) for name, shape in shapes)
    if keys is None or values is None or states is None:
        return None
    return FeatureSlots(keys[0], values[0], states[0])


def _tensor(entry: Entry, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    part = entry.parts.get(name)
    if part is None or (list(part.shape), part.kind) != (list(shape), KINDS.get(dtype)):
        return None
    return torch.frombuffer(part.data, dtype=dtype).view(*shape)
