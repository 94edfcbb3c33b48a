"""A model of known ability: it continues as the text did after the same words, within its view."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from triforce.eval import EvalConfig, EvalContext, Text, eval_config
from triforce.kvcache import StreamingView
from triforce.llm import LLM
from triforce.ragged import Ints

MATCH = 16
SURE = 20.0


class Recaller:
    """Stands in for a decoder. `reach`: the most tokens that it sees. `sights`: their number at each scored place."""

    def __init__(self, llm: LLM, reach: int = 10**9) -> None:
        self.config = llm.target.config
        self.device = llm.target.decoder.device
        self.dtype = llm.target.decoder.dtype
        self.reach = reach
        self.ids: list[int] = []
        self.sights: list[int] = []

    def __call__(self, ids_BT: Ints, counts_B: Any, view: Any, at_BJ: Ints | None = None) -> Tensor:
        start = int(view.lengths_B[0])
        self.ids = [*self.ids[:start], *[-1] * (start - len(self.ids)), *ids_BT[0].tolist()]
        seen_B = view.lengths_B
        seen_B += len(ids_BT[0])
        if at_BJ is not None:
            return torch.zeros(1, 0, self.config.vocab_size)
        reach = min(self.reach, view.window) if isinstance(view, StreamingView) else self.reach
        return torch.stack([self.logits(self.ids[max(0, n + 1 - reach) : n + 1]) for n in range(start, len(self.ids))])[
            None
        ]

    def with_int8_inputs(self) -> Recaller:
        return self

    def logits(self, context: list[int]) -> Tensor:
        self.sights.append(len(context))
        best = max(range(1, len(context)), key=lambda n: (match(context, n), n), default=0)
        logits_V = torch.zeros(self.config.vocab_size)
        if best and match(context, best) > 1:
            logits_V[context[best]] = SURE
        return logits_V


def match(context: list[int], n: int) -> int:
    """Return how many tokens before place n equal those at the end."""
    length = 0
    while length < min(MATCH, n) and context[n - 1 - length] == context[-1 - length]:
        length += 1
    return length


def subject(
    llm: LLM, model: Recaller, ids: list[int], numbers: EvalConfig | None = None, kind: str = "prose"
) -> EvalContext:
    """Return an evaluation context of the model and one text."""
    stand_in: Any = SimpleNamespace(
        target=SimpleNamespace(decoder=model, config=model.config), draft=None, tokenizer=llm.tokenizer
    )
    return EvalContext(stand_in, [Text("text", kind, torch.tensor(ids))], numbers or eval_config(512, 512))


def noise(length: int, seed: int = 0) -> list[int]:
    """Return random tokens of the tiny vocabulary."""
    return torch.randint(3, 258, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
