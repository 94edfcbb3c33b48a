"""Incremental detokenising, on the DecodeStream of `tokenizers`."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as Core
from tokenizers.decoders import DecodeStream

CONTEXT = 16  # tokens of the preceding text that can change how the next one reads


class TextStream:
    """Text of the tokens stepped through, in whole characters and without special tokens."""

    def __init__(self, core: Core, after: Sequence[int] = ()) -> None:
        self._core = core
        self._shown = list(after[-CONTEXT:]) if after else []
        if self._text(self._shown).endswith("�"):
            self._shown = []  # the character that is cut there would be shown again
        self._held: list[int] = []
        self._stream = DecodeStream(self._shown, skip_special_tokens=True)

    def step(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        self._held.append(token)
        try:
            text = self._stream.step(self._core, token)
        except Exception:
            # Byte tokens that make no character can change how the ones before them read; that text is out already.
            self._stream = DecodeStream(skip_special_tokens=True)
            text = self._stream.step(self._core, self._held)
        if not text:
            return ""
        self._shown, self._held = self._held, []
        return str(text)

    def flush(self) -> str:
        """The rest at the end of the text: what is no whole character reads as U+FFFD. Ends the stream."""
        before = self._text(self._shown)
        rest = self._text(self._shown + self._held)[len(before) :]
        self._held = []
        return rest

    def _text(self, ids: list[int]) -> str:
        return str(self._core.decode(ids, skip_special_tokens=True))
