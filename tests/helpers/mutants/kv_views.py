"""Faults of KV memory and of its views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.helpers.mutants.mutation import Edit, Mutant, Swap

VIEW = "triforce.kvcache.views.retrieval:RetrievalView"
Views = Callable[[Any, list[int], list[int]], list[tuple[int, Any]]]


def own_length(view: Any) -> Any:
    """Falls behind after a full acceptance, and feeds the difference over exact slots."""
    ahead_B = np.array([row.fed_tokens for row in view.selections])
    ahead_B = np.where(ahead_B == 0, view.full.lengths_B, ahead_B)
    for row, ahead in zip(view.selections, ahead_B.tolist(), strict=True):
        row.fed_tokens = ahead
    return ahead_B


def forget(view: Any, lengths_B: Any) -> None:
    """Takes nothing back."""


def of_the_neighbour(views: Views) -> Views:
    flip = {2: lambda units_BU: units_BU, 4: lambda units_LBGU: units_LBGU.flip(2)}

    def flipped(view: Any, starts: list[int], counts: list[int]) -> list[tuple[int, Any]]:
        found = views(view, starts, counts)
        return [(n, replace(lists, units=flip[lists.units.ndim](lists.units))) for n, lists in found]

    return flipped


def shifted(views: Views, by: int) -> Views:
    """Queries stand `by` places further than they should."""

    def moved(view: Any, starts: list[int], counts: list[int]) -> list[tuple[int, Any]]:
        found = views(view, starts, counts)
        return [(n, replace(lists, starts=[max(0, x + by) for x in lists.starts])) for n, lists in found]

    return moved


def by_the_pass(rounded: Any) -> Any:
    """A number that no token has, the largest of any token of the pass, is rounded with each."""

    def wrong(x_GND: Any) -> Any:
        largest_GN1 = x_GND.abs().amax((1, 2), keepdim=True).expand(-1, x_GND.shape[1], -1)
        rows_GNR = rounded(torch.cat([x_GND, largest_GN1], -1))
        return torch.cat([rows_GNR[..., :-3], rows_GNR[..., -2:]], -1)

    return wrong


TEST = "tests/laws/test_law_mutants.py::test_law_mutant_fails_its_checks"
WRITE_ONCE = """\
if not hasattr(self, "written_LS"):
        self.written_LS = torch.zeros(self.keys_LGSD.shape[0], self.keys_LGSD.shape[2], dtype=torch.bool)
    old_N1 = self.written_LS[layer, slots_N, None]
    k_GND = torch.where(old_N1, self.keys_LGSD[layer][:, slots_N], k_GND)
    v_GND = torch.where(old_N1, self.values_LGSD[layer][:, slots_N], v_GND)
    self.written_LS[layer, slots_N] = True
    """
UNROUNDED = """\
        if batch.positions == [0]:
            exact = [head(x).flatten(0, 1).transpose(0, 1) for x in (rotated(k_BTGD, rotation), v_BTGD)]
            mixed_THD, mass_GK = attend(q_BTHD[0].float(), *exact)
            return q_BTHD, head(mixed_THD)[None].to(dtype), mass_GK
"""
AGAIN = """\
    from triforce.backends.torch.int8_rows import numbers, rounded
    from triforce.backends.torch.tensors import as_tensor

    again = lambda rows: rounded(numbers(as_tensor(rows)))
"""
MUTANTS = [
    Mutant(
        "stale KV after a rollback",  # the slot of a rejected draft token keeps what that token wrote
        TEST,
        (
            Edit(
                "triforce.backends.torch.kv:TorchKV.write",
                (FIRST := "for rows_GSD", WRITE_ONCE + FIRST),
            ),
        ),
        ("same text: draft", "same KV: draft"),
    ),
    Mutant(
        "a lower tier rewrites a committed slot",
        TEST,
        (
            Edit(
                "triforce.kvcache.views.retrieval:RetrievalView.lengths_B",
                (
                    "np.maximum(fed_tokens_B, self.full.lengths_B)",
                    "np.where(fed_tokens_B > 0, fed_tokens_B, self.full.lengths_B)",
                ),
            ),
        ),
        ("same KV: retrieval", "same KV: triforce", "same text: triforce"),
    ),
    Mutant(
        "wrong KV group",  # query head h reads group h modulo G
        TEST,
        (
            Edit(
                "triforce.backends.torch.attention:fold",
                ("q_THD.transpose(0, 1)", "q_THD.transpose(0, 1).view(H // G, G, T, D).transpose(0, 1)"),
            ),
            Edit(
                "triforce.backends.torch.attention:unfold",
                (
                    "attn_out_GRD.reshape(-1, T, attn_out_GRD.shape[-1])",
                    "attn_out_GRD.unflatten(1, (-1, T)).transpose(0, 1).reshape(-1, T, attn_out_GRD.shape[-1])",
                ),
            ),
        ),
        ("same text: ar", "same KV: ar"),
    ),
    *(
        Mutant(name, "tests/kvcache/test_kv_laws.py::test_view_mutant_breaks_law", (edit,))
        for name, edit in {
            "a view falls behind the committed length": Swap(f"{VIEW}.lengths_B", lambda _: property(own_length)),
            "a retrieval view is not rewound": Swap(f"{VIEW}.rewind", lambda _: forget),
            "the full view is not rewound": Swap("triforce.kvcache.views.full:FullView.rewind", lambda _: forget),
            "each KV head reads its neighbour's selection": Swap(f"{VIEW}._views", of_the_neighbour),
            "a query sees a rejected slot": Swap(f"{VIEW}._views", lambda views: shifted(views, 1)),
            "a view writes one slot early": Swap(f"{VIEW}._views", lambda views: shifted(views, -1)),
        }.items()
    ),
    *(
        Mutant(name, "tests/kvcache/test_torch_int8_kv.py::test_int8_mutant_is_noticed", (edit,))
        for name, edit in {
            "int8 KV: the first pass attends before it rounds": Edit(
                "triforce.backends.torch.kv:TorchKV.layer_attention",
                ("        mixed_BTHD, mass_BGU =", UNROUNDED + "        mixed_BTHD, mass_BGU ="),
            ),
            "int8 KV: keys alone are rotated for int8": Edit(
                "triforce.backends.torch.kv:TorchKV.layer_attention",
                ("head(rotated(q_BTHD, rotation))", "rotated(q_BTHD, rotation)"),
            ),
            "int8 KV: mixed values are not rotated back": Edit(
                "triforce.backends.torch.kv:TorchKV.layer_attention", ("head(mixed_BTHD)", "mixed_BTHD")
            ),
            "int8 KV: a scale is that of a pass": Swap("triforce.backends.torch.kv:rounded", by_the_pass),
            "int8 KV: a copy is rounded again": Edit(
                "triforce.kvcache.pool:PagePool.write",
                (
                    "self.kv.write(layer",
                    "keys_GND, values_GND = map(again, (keys_GND, values_GND))\n        self.kv.write(layer",
                ),
                ("    for layer", AGAIN + "    for layer"),
            ),
        }.items()
    ),
]
