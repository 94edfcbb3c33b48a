"""StreamingLLM written out token by token, the reference of the draft's view.

It keeps every key unrotated, gathers [sinks | window] for each query, and rotates each key to its place in that list,
as Xiao et al. 2023 describe it.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from tests.helpers.simple_cache import DEVICE
from tests.helpers.small_decoder import CLOSE, feed, small_decoder, text, turn, weigh
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import ForwardBatch, LayerAttention
from triforce.kvcache import StreamingView
from triforce.model.config import ModelConfig
from triforce.ragged import Ints

torch.set_num_threads(1)
DECODER = small_decoder(layers=3)
SINKS = 4
WINDOW = 9
SLACK = 6


class Slow:
    """One row that keeps all keys. Only `cut` removes any."""

    def __init__(self, config: ModelConfig, sinks: int, window: int) -> None:
        self.config = config
        self.sinks = sinks
        self.window = window
        self.length = 0
        self.keys: list[list[Tensor]] = [[] for _ in range(config.layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(config.layers)]

    @property
    def kv(self) -> Slow:
        return self

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        assert counts_B.tolist() == [width]
        self._width = width
        return ForwardBatch([self.length], [])

    def record(self, batch: ForwardBatch, output: object = None) -> None:
        self.length += self._width

    def layer_attention(self, batch: ForwardBatch, width: int) -> LayerAttention:
        return lambda layer, q, k, v: (q, self.attend(layer, q, k, v), q)

    def attend(self, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        keys = self.keys[layer]
        values = self.values[layer]
        del keys[self.length :], values[self.length :]
        keys += k_BTGD[0].double()
        values += v_BTGD[0].double()
        mixed = [self._mix(keys, values, self.length + t, q_HD) for t, q_HD in enumerate(q_BTHD[0])]
        return torch.stack(mixed)[None].to(q_BTHD.dtype)

    def _mix(self, keys: list[Tensor], values: list[Tensor], position: int, q_HD: Tensor) -> Tensor:
        window_start = max(self.sinks, position - self.window + 1)
        visible = [*range(min(self.sinks, position + 1)), *range(window_start, position + 1)]
        k_NGD, v_NGD = (torch.stack([memory[n] for n in visible]) for memory in (keys, values))
        k_NGD = turn(k_NGD, self.config.rope, range(len(visible)))
        q_HD = turn(q_HD[None], self.config.rope, [len(visible) - 1])[0]
        group = self.config.heads // self.config.kv_heads
        all_1N = torch.ones(1, len(visible), dtype=torch.bool, device=DEVICE)
        return torch.cat(
            [
                weigh(q_HD[h : h + 1], k_NGD[:, h // group], all_1N) @ v_NGD[:, h // group]
                for h in range(self.config.heads)
            ]
        )


def view(
    rows: int = 1,
    decoder: Decoder = DECODER,
    slack: int = SLACK,
    window: int = WINDOW,
    sinks: int = SINKS,
    read_tokens: int | None = None,
) -> StreamingView:
    return StreamingView(decoder.config, rows, sinks, window, slack, decoder.dtype, decoder.device, read_tokens)


def slow_logits(ids: list[int], decoder: Decoder = DECODER, window: int = WINDOW, sinks: int = SINKS) -> Tensor:
    return feed(decoder, Slow(decoder.config, sinks, window), [ids])[0]


def in_pieces(cache: StreamingView, ids: list[int], chance: Random, decoder: Decoder = DECODER) -> Tensor:
    """Return the logits of a text fed in passes of random sizes."""
    logits = []
    while ids:
        count = chance.randint(1, cache.slack)
        logits += feed(decoder, cache, [ids[:count]])
        ids = ids[count:]
    return torch.cat(logits)


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, **CLOSE)


IDS = text(70)
SLOW = slow_logits(IDS)
