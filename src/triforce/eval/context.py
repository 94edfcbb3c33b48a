"""EvalContext: the subject of an evaluation, that is a model, its draft if any, texts, and the lengths to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from triforce.backends.decoder import Decoder
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.errors import RequestError
from triforce.eval.scoring import full_view, nats
from triforce.llm import LLM

CODE = {".c", ".cc", ".cpp", ".go", ".h", ".java", ".js", ".jl", ".py", ".rs", ".sh", ".ts"}
KINDS = ("prose", "code")
SPAN = 32_768

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Text:
    """A text, or a part of one. ids_N: its tokens. start: position of the first one in the whole text."""

    name: str
    kind: str
    ids_N: Tensor
    start: int = 0


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """Sizes of an evaluation. All lengths and positions are in tokens.

    - span: length of a window of text.
    - longest_window: length of the longest windows.
    - windows: least number of windows of each kind of text, if the texts have them.
    - max_windows: greatest number of windows of each kind, the longest ones; None: all.
    - recent: tokens that the cut model sees in `gain`. stride: step between its windows.
    - block: tokens whose mean gain is one observation.
    - haystacks: number of haystacks of the longest span. Shorter spans get up to four times as many.
    - copies: spans that are repeated at each distance.
    - compared_tokens: tokens of a window where draft and target are compared.
    - prompts, new_tokens: number of sampled continuations, and the length of each.
    """

    span: int
    longest_window: int
    windows: int = 4
    max_windows: int | None = None
    recent: int = 2048
    stride: int = 256
    block: int = 512
    haystacks: int = 3
    copies: int = 8
    compared_tokens: int = 1024
    prompts: int = 20
    new_tokens: int = 512
    seed: int = 1

    @property
    def far_positions(self) -> range:
        """Return the positions where far context should help: 16K to 24K of 32K."""
        return range(self.span // 2, self.span * 3 // 4)


@dataclass(eq=False)
class EvalContext:
    """A loaded model with texts. Losses that several measurements need are computed once."""

    llm: LLM
    texts: list[Text]
    config: EvalConfig
    quiet: bool = False
    label: str = ""
    _traces: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)

    @property
    def target(self) -> Decoder:
        return self.llm.target.decoder

    @property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.llm)

    def windows(self, length: int | None = None, max_windows: int | None = None, min_tokens: int = 0) -> list[Text]:
        """Return windows of `length` tokens (None: a span), spread over each text.

        max_windows: number of windows of each kind of text, the longest first; None: the number in the config.
        min_tokens: shorter windows are left out.
        """
        chosen_windows = []
        max_windows = self.config.max_windows if max_windows is None else max_windows
        for kind in KINDS:
            texts = [text for text in self.texts if text.kind == kind]
            windows_per_text = -(-self.config.windows // max(1, len(texts)))
            windows = [
                window
                for text in texts
                for window in spread_windows(text, length or self.config.span, windows_per_text)
            ]
            chosen_windows += (
                windows
                if max_windows is None
                else sorted(windows, key=lambda candidate: -len(candidate.ids_N))[:max_windows]
            )
        return [window for window in chosen_windows if len(window.ids_N) >= min_tokens]

    def trace(self, text: Text) -> Tensor:
        """Return the loss of each token of a text but the first, given all before it: float32 (N - 1), in nats."""
        key = (text.name, text.start, len(text.ids_N))
        if key not in self._traces:
            self._traces[key] = nats(self.target, full_view(self.target, len(text.ids_N)), text.ids_N)
        return self._traces[key]

    def with_progress(self, items: Iterable[T]) -> Iterable[T]:
        """Iterate over items with a progress bar, which only terminals show."""
        bar: Iterable[T] = tqdm(list(items), desc=self.label, leave=False, disable=self.quiet or None)
        return bar


def group_by_kind(labelled_items: Sequence[tuple[str, T]]) -> dict[str, list[T]]:
    """Return items by kind of text, in the order of `KINDS`, without kinds that have no items."""
    return {
        kind: [item for item_kind, item in labelled_items if item_kind == kind]
        for kind in KINDS
        if kind in dict(labelled_items)
    }


def spread_windows(text: Text, length: int, max_windows: int) -> list[Text]:
    """Return up to `max_windows` windows of `length` tokens without overlap. A shorter text is one window."""
    slack = len(text.ids_N) - length
    if slack < 0:
        return [text]
    count = min(max_windows, len(text.ids_N) // length)
    starts = [int((k + 0.5) * len(text.ids_N) / count - length / 2) for k in range(count)]
    return [Text(text.name, text.kind, text.ids_N[start : start + length], start) for start in starts]


def tokenize(llm: LLM, texts: Mapping[str, str]) -> list[Text]:
    """Return tokenized texts on the target's device. Raises RequestError for a text of fewer than two tokens."""
    device = llm.target.decoder.device
    return [Text(text.name, text.kind, text.ids_N.to(device)) for text in encode_texts(tokenizer_of(llm), texts)]


def encode_texts(tokenizer: Tokenizer, texts: Mapping[str, str]) -> list[Text]:
    """Return tokenized texts, each of the kind that `kind_of` returns for its name.

    Raises RequestError for a text of fewer than two tokens.
    """
    encoded_texts = [Text(name, kind_of(name), torch.tensor(tokenizer.encode(text))) for name, text in texts.items()]
    if short_names := [text.name for text in encoded_texts if len(text.ids_N) < 2]:
        raise RequestError(f"there is nothing to predict in {', '.join(short_names)}; give longer texts")
    return encoded_texts


def kind_of(name: str) -> str:
    """Return one of `KINDS`: code for a name `code_...` or a suffix of `CODE`, else prose."""
    path = PurePath(name)
    return "code" if path.name.startswith("code_") or path.suffix in CODE else "prose"


def tokenizer_of(llm: LLM) -> Tokenizer:
    """Return the model's tokenizer. Raises RequestError if it has none."""
    if llm.tokenizer is None:
        raise RequestError(f"{llm.target.path} has no tokenizer, so it cannot be judged on texts")
    return llm.tokenizer


def eval_config(context: int, max_context: int, longest: int | None = None) -> EvalConfig:
    """Return the sizes for a model of `context` positions. At most `max_context` of them are used.

    longest: length of the longest windows of a quick evaluation, which also has few windows; None: not quick.
    """
    quick = longest is not None
    longest_window = min(context, max_context, longest or context)
    span = min(SPAN, longest_window)
    recent = min(2048, max(32, span // 4))
    sizes = {"recent": recent, "stride": recent // 8, "block": recent // 4, "compared_tokens": min(1024, span // 8)}
    quick_counts = {"windows": 1, "max_windows": 2, "haystacks": 1, "copies": 2, "prompts": 8} if quick else {}
    return EvalConfig(span, longest_window, new_tokens=min(128 if quick else 512, span // 8), **sizes, **quick_counts)
