"""Session: a conversation whose KV is kept between turns, so that each turn reads only what is new."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

from triforce.backends.kernel_api import pages_for
from triforce.engine.output_stream import OutputChunk
from triforce.engine.sequence_group import OnPrefill
from triforce.engine.tier_builder import SharedKV
from triforce.errors import RequestError
from triforce.interface.keyword_advice import advised
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import FullView
from triforce.kvcache.views.full import TAIL
from triforce.kvcache.window_mark import WindowMark
from triforce.llm import LLM
from triforce.ragged import common_prefix, ints


@advised
class Session:
    """One row of target KV, as long as the model's context. Each turn gives the whole text, and its new end is read.

    Layers with a window keep those before the end of the latest text, and of the latest prompt: a turn that leaves out
    the answer reads what is new, and one that changes more reads all.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        target = llm.models.target
        capacity = target.config.context + llm.speculation.reach
        pool = SharedKV(llm.models, llm.speculation, 1, pages_for(capacity)).pool.more(1)
        pool.reserve(0, capacity)
        self._memory = FullView(pool)
        self._seen: list[int] = []
        self._mark = WindowMark(pool)

    def __repr__(self) -> str:
        return f"Session({self.llm!r})"

    def ask(
        self,
        conversation: str | Sequence[int],
        params: SamplingParams | None = None,
        on_prefill: OnPrefill | None = None,
    ) -> Generator[OutputChunk | RequestOutput, None, None]:
        """Continue the whole conversation so far. Yields what `LLM.stream` does; n must be 1. One answer at a time.

        params: None is `LLM.sampling_params()`.

        After an answer that was given up half-way the session is in order for the next one. Raises TriforceError.
        """
        params = params or self.llm.sampling_params()
        if params.n != 1:
            raise RequestError(f"a session gives one answer at a time, not n = {params.n}; use LLM.generate")
        ids = self.llm.encode(conversation)
        reusable = max(0, len(ids) - 1 - TAIL) if params.prompt_logprobs is None else 0  # these score every position
        # The pool may hold tokens past the end of the last answer: those that were verified but cut off.
        kept = min(common_prefix(self._seen, ids), reusable, int(self._memory.lengths_B[0]))
        self._mark.go_back(0, kept)
        self._memory.rewind(ints([kept]))
        self._seen = list(ids)
        with closing(self.llm.stream(ids, params, on_prefill=on_prefill, memory=self._memory)) as pieces:
            for piece in pieces:
                if isinstance(piece, OutputChunk):
                    if len(self._seen) == len(ids):
                        self._mark.take(0)
                    self._seen += piece.token_ids
                yield piece
