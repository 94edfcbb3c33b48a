"""Pages of KV for tests of the native kernels, and reference attention over them.

Shape suffixes: B rows, T queries of a row, H query heads, G KV heads, S keys, P pages, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.backends.torch.int8_rows import numbers, rotated_head, rounded

PAGE = 16
native = dispatch.native


def usable() -> list[tuple[str, torch.dtype]]:
    """Return each level that this machine can run, with each storage type."""
    levels = native.levels() if native else []
    return [(level, dtype) for level in levels for dtype in (torch.bfloat16, torch.float32)]


@contextmanager
def at_level(name: str) -> Iterator[None]:
    """Use a level within a block. Level and number of threads are restored afterwards."""
    previous_level = native.level()
    threads = native.threads()
    native.use(name)
    yield
    native.use(previous_level)
    native.set_threads(threads)


class Paged:
    """Memory of one layer, NaN until it is written. Rows get scattered pages.

    `int8`: with room for copies, which hold arbitrary numbers. `turn` (D, D): with room for sketches. `codes`: keys and
    values are int8 with scales, of rotated heads if `hadamard`. `attention_sink_logits` (H) and `cap`: parameters of
    attention.
    """

    def __init__(
        self,
        G: int,
        D: int,
        pages: int,
        dtype: torch.dtype,
        seed: int = 0,
        int8: bool = False,
        turn: Tensor | None = None,
        codes: bool = False,
        hadamard: bool = True,
        attention_sink_logits: Tensor | None = None,
        cap: float = 0.0,
    ) -> None:
        assert native is not None
        self.G = G
        self.D = D
        self.dtype = dtype
        self.codes = codes
        self.hadamard = hadamard
        self.draw = torch.Generator().manual_seed(seed)
        self.free = torch.randperm(pages, generator=self.draw) + 1
        rules = {"attention_sink_logits": attention_sink_logits, "score_cap": cap}
        sketches = torch.zeros(G, pages + 1, D + PAGE, dtype=torch.bfloat16) if turn is not None else None
        if codes:  # -1 and, two of them, NaN
            self.memory = torch.full((G, pages + 1, 2 * PAGE * (D + 2)), -1, dtype=torch.int8)
            options = rules | {"rotation": None if hadamard else turn, "sketches": sketches}
            options |= {"is_bf16": dtype == torch.bfloat16}
            self.pages = native.Pages(self.memory, D, hadamard=hadamard, **options)
            return
        self.keys, self.values = (torch.full((G, pages + 1, PAGE * D), torch.nan, dtype=dtype) for _ in range(2))
        copies = [torch.full(self.keys.shape, 99, dtype=torch.int8) for _ in range(2)] if int8 else []
        scales = [torch.full((*self.keys.shape[:2], 2), torch.nan)] if int8 else []
        self.pages = native.Pages(self.keys, self.values, D, turn, sketches, *copies, *scales, **rules)

    def normal(self, *shape: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self.draw) * gain).to(self.dtype)

    def take(self, tokens: int) -> Tensor:
        """Return a list of pages for `tokens` tokens, int32."""
        count = -(-tokens // PAGE)
        taken = self.free[:count]
        self.free = self.free[count:]
        assert len(taken) == count
        return taken.int()

    def fill(self, list_P: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> None:
        self.write(slots(list_P, len(k_SGD)), k_SGD, v_SGD)

    def write(self, slots_N: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> None:
        self.pages.write(slots_N, *(rounded(x) if self.codes else x for x in (k_NGD, v_NGD)))

    def row(self, S: int) -> Row:
        """Return a row of random keys and values, as stored in memory; values as outputs mix them."""
        row = Row(self.take(S), self.normal(S, self.G, self.D), self.normal(S, self.G, self.D))
        self.fill(row.list_P, row.k_SGD, row.v_SGD)
        if self.codes:
            return Row(row.list_P, numbers(rounded(row.k_SGD)), self.back(numbers(rounded(row.v_SGD))))
        return row

    def back(self, x_D: Tensor) -> Tensor:
        """Undo the rotation of heads for int8, or apply it: the rotation is its own inverse."""
        return rotated_head(x_D) if self.hadamard else x_D


@dataclass
class Row:
    list_P: Tensor
    k_SGD: Tensor
    v_SGD: Tensor


def slots(list_P: Tensor, count: int) -> Tensor:
    return (list_P.long()[:, None] * PAGE + torch.arange(PAGE)).flatten()[:count].contiguous()


def attend(
    kv: Paged,
    q_BTHD: Tensor,
    starts: list[int],
    counts: list[int],
    lists: Tensor,
    weigh: bool = True,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Return mixed values (B, T, H, D), and mass (B, G, P), NaN unless `weigh`. Both are NaN before."""
    mixed_BTHD = torch.full_like(q_BTHD, torch.nan)
    mass_BGP = torch.full((len(q_BTHD), kv.G, lists.shape[-1]), torch.nan)
    kv.pages.attend(q_BTHD, starts, counts, lists, mixed_BTHD, mass_BGP if weigh else None, **options)
    return mixed_BTHD, mass_BGP


def pad_lists(lists: list[Tensor]) -> Tensor:
    """Return page lists as one tensor, padded by -1, which no kernel may look up."""
    return torch.nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=-1)


def visible(start: int, T: int, S: int, sinks: int = 0, window: int = 0) -> Tensor:
    """Return which keys each query sees, (T, S)."""
    place_T1 = start + torch.arange(T)[:, None]
    key_S = torch.arange(S)
    seen_TS = key_S <= place_T1
    return seen_TS & ((key_S < sinks) | (key_S > place_T1 - window)) if window else seen_TS


def by_the_book(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    seen_TS: Tensor,
    q_sinks_THD: Tensor | None = None,
    sinks: int = 0,
    attention_sink_logits_H: Tensor | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return mixed values (T, H, D) and the mass of each page (G, P), in float64."""
    G = k_SGD.shape[1]
    h = q_THD.shape[1] // k_SGD.shape[1]
    k_SHD, v_SHD = (x.double().repeat_interleave(h, 1) for x in (k_SGD, v_SGD))
    scores_HTS = torch.einsum("thd,shd->hts", q_THD.double(), k_SHD)
    if q_sinks_THD is not None:
        scores_HTS[..., :sinks] = torch.einsum("thd,shd->hts", q_sinks_THD.double(), k_SHD[:sinks])
    scores_HTS /= q_THD.shape[-1] ** 0.5
    scores_HTS = cap * (scores_HTS / cap).tanh() if cap else scores_HTS
    exps_HTS = scores_HTS.masked_fill(~seen_TS, -torch.inf).exp()
    beside_H11 = 0.0 if attention_sink_logits_H is None else attention_sink_logits_H.double().exp()[:, None, None]
    weights_HTS = exps_HTS / (exps_HTS.sum(-1, keepdim=True) + beside_H11)
    padded_HTS = torch.nn.functional.pad(weights_HTS, (0, -len(k_SGD) % PAGE))
    mass_GP = padded_HTS.unflatten(-1, (-1, PAGE)).sum((1, 3)).unflatten(0, (G, h)).sum(1)
    return torch.einsum("hts,shd->thd", weights_HTS, v_SHD), mass_GP
