"""What is evaluated: a model, perhaps its draft, and the texts to judge them by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from triforce.backends.decoder import Decoder
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.errors import RequestError
from triforce.eval.config import EvalConfig
from triforce.eval.scoring import full_view, nats
from triforce.llm import LLM

CODE = {".c", ".cc", ".cpp", ".go", ".h", ".java", ".js", ".jl", ".py", ".rs", ".sh", ".ts"}
KINDS = ("prose", "code")

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Text:
    """A text, or a stretch of one; `ids_N` are its tokens, the first of them number `start` of the text."""

    name: str
    kind: str
    ids_N: Tensor
    start: int = 0


@dataclass(eq=False)
class EvalContext:
    """A loaded model with the texts; what several measurements need is computed once."""

    llm: LLM
    texts: list[Text]
    plan: EvalConfig
    quiet: bool = False
    label: str = ""
    _traces: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)

    @property
    def target(self) -> Decoder:
        return self.llm.target.decoder

    @property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.llm)

    def windows(self, length: int | None = None, most: int | None = None) -> list[Text]:
        """Stretches of `length` tokens (None: a span), spread over each text; the `most` longest of each kind."""
        found, most = [], self.plan.most if most is None else most
        for kind in KINDS:
            texts = [text for text in self.texts if text.kind == kind]
            each = -(-self.plan.windows // max(1, len(texts)))
            windows = [window for text in texts for window in spread(text, length or self.plan.span, each)]
            found += windows if most is None else sorted(windows, key=lambda one: -len(one.ids_N))[:most]
        return found

    def trace(self, text: Text) -> Tensor:
        """Loss of each token of a text but the first, with all of it in sight: float32 (N - 1), in nats."""
        key = (text.name, text.start, len(text.ids_N))
        if key not in self._traces:
            self._traces[key] = nats(self.target, full_view(self.target, len(text.ids_N)), text.ids_N)
        return self._traces[key]

    def steps(self, items: Iterable[T]) -> Iterable[T]:
        """The items, with a progress bar on terminals only."""
        bar: Iterable[T] = tqdm(list(items), desc=self.label, leave=False, disable=self.quiet or None)
        return bar


def spread(text: Text, length: int, most: int) -> list[Text]:
    """Up to `most` stretches of `length` tokens that do not overlap; all of a text that is shorter."""
    slack = len(text.ids_N) - length
    if slack < 0:
        return [text]
    count = min(most, len(text.ids_N) // length)
    starts = [int((k + 0.5) * len(text.ids_N) / count - length / 2) for k in range(count)]
    return [Text(text.name, text.kind, text.ids_N[start : start + length], start) for start in starts]


def tokenize(llm: LLM, texts: Mapping[str, str]) -> list[Text]:
    """Texts by file name; code is what is named so (`code_...`) or has such a suffix. Raises RequestError."""
    tokenizer, device = tokenizer_of(llm), llm.target.decoder.device
    found = [Text(name, kind_of(name), torch.tensor(tokenizer.encode(text))) for name, text in texts.items()]
    if short := [text.name for text in found if len(text.ids_N) < 2]:
        raise RequestError(f"there is nothing to predict in {', '.join(short)}; give longer texts")
    return [Text(text.name, text.kind, text.ids_N.to(device)) for text in found]


def kind_of(name: str) -> str:
    """One of `KINDS`."""
    path = PurePath(name)
    return "code" if path.name.startswith("code_") or path.suffix in CODE else "prose"


def tokenizer_of(llm: LLM) -> Tokenizer:
    """Raises RequestError if the model has none."""
    if llm.tokenizer is None:
        raise RequestError(f"{llm.target.path} has no tokenizer, so it cannot be judged on texts")
    return llm.tokenizer
