"""One pool of KV pages per model. Lengths move, data does not.

Shape suffixes: B rows, P pages of a row, N tokens, L layers, G KV heads, S slots (pages * PAGE), D head size.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from triforce.config import ModelConfig
from triforce.errors import CacheError

PAGE = 16
"""Tokens per page."""


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE)


class Pool:
    """K and V of every layer in pages, a page table per row, and the committed length of each row.

    Slots below `lengths_B` hold exact, committed values and are written once; slots at or beyond it are working space
    of whichever view runs. Page 0 is scratch: padding is written there and nothing is read from it. A head's pages lie
    behind one another, so that a row with consecutive pages is a plain slice.
    """

    def __init__(
        self, config: ModelConfig, rows: int, pages: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.config = config
        shape = (config.layers, config.kv_heads, (pages + 1) * PAGE, config.head_dim)
        try:
            self.keys_LGSD = torch.empty(shape, dtype=dtype, device=device)
            self.values_LGSD = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch has no narrower one for a CPU
            raise CacheError(
                f"the KV cache needs {2 * prod(shape) * dtype.itemsize / 2**30:.1f} GiB, more than there is. "
                "Use a smaller max_tokens, a shorter prompt, fewer rows at once, --context, or --dtype bfloat16"
            ) from error
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        self._slots: list[Tensor] = [torch.zeros(0, dtype=torch.long, device=device) for _ in range(rows)]
        self._first_slot: list[int | None] = [None] * rows  # where the pages of a row are consecutive
        self._free = list(range(1, pages + 1))

    @property
    def device(self) -> torch.device:
        return self.keys_LGSD.device

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def reserve(self, b: int, tokens: int) -> None:
        """Give row b the pages for `tokens` tokens in all; consecutive ones where there are such.

        Raises CacheError, and changes nothing, when too few are free.
        """
        wanted = pages_for(tokens) - len(self.tables[b])
        if wanted <= 0:
            return
        if wanted > len(self._free):
            raise CacheError(
                f"the KV pool has {len(self._free)} free pages of {PAGE} tokens, {wanted} more are needed. "
                "Use a shorter prompt, a smaller max_tokens or fewer rows at once"
            )
        run = self._run(wanted, after=self.tables[b][-1] if self.tables[b] else None)
        taken = set(run)
        self._free = [page for page in self._free if page not in taken]
        self._set_table(b, self.tables[b] + run)

    def release(self, b: int) -> None:
        """Take back the pages of row b; it holds no tokens from now on."""
        self._free = sorted(self._free + self.tables[b])
        self._set_table(b, [])
        self.lengths_B[b] = 0

    def slots(self, b: int, start: int, stop: int) -> Tensor:
        """Slots of tokens [start, stop) of row b."""
        return self._slots[b][start:stop]

    def write(self, layer: int, slots_N: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> None:
        """Put K and V of N tokens into their slots."""
        self.keys_LGSD[layer].index_copy_(1, slots_N, k_NGD.transpose(0, 1))
        self.values_LGSD[layer].index_copy_(1, slots_N, v_NGD.transpose(0, 1))

    def span(self, layer: int, b: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens [start, stop) of row b, each (G, N, D); no copy where the pages are consecutive."""
        keys_GSD, values_GSD = self.keys_LGSD[layer], self.values_LGSD[layer]
        first = self._first_slot[b]
        if first is None:
            slots_N = self.slots(b, start, stop)
            return keys_GSD.index_select(1, slots_N), values_GSD.index_select(1, slots_N)
        return keys_GSD[:, first + start : first + stop], values_GSD[:, first + start : first + stop]

    def _set_table(self, b: int, table: list[int]) -> None:
        self.tables[b] = table
        pages_P = torch.tensor(table, dtype=torch.long, device=self.device)
        self._slots[b] = (pages_P[:, None] * PAGE + torch.arange(PAGE, device=self.device)).flatten()
        consecutive = bool(table) and table == list(range(table[0], table[0] + len(table)))
        self._first_slot[b] = table[0] * PAGE if consecutive else None

    def _run(self, wanted: int, after: int | None) -> list[int]:
        candidates = self._free[: len(self._free) - wanted + 1]
        starts = [i for i, page in enumerate(candidates) if self._free[i + wanted - 1] - page == wanted - 1]
        following = [i for i in starts if after is not None and self._free[i] == after + 1]
        i = (following or starts or [0])[0]
        return self._free[i : i + wanted]
