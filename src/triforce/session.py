"""Session: a conversation whose KV stays in memory between turns. Each turn prefills only its new tokens."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from threading import Lock

from triforce.backends.kernel_api import pages_for
from triforce.engine.engine import OutputChunk
from triforce.engine.inputs import one_prompt, params_of_one
from triforce.engine.sequence_group import OnPrefill
from triforce.engine.tier_builder import SharedKV
from triforce.errors import RequestError
from triforce.interface.keyword_advice import advised
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import FullView
from triforce.kvcache.pool import WindowSnapshot
from triforce.kvcache.views.full import TAIL
from triforce.llm import LLM
from triforce.ragged import common_prefix, ints


@advised
class Session:
    """A conversation that keeps its KV: one row of the target's KV, as long as the context of `llm`.

    Each turn passes the whole text, and only its new end is read. The row stays allocated until the session is dropped.
    `LLM` chooses dtype, device and mode. Raises TypeError unless `llm` is an LLM, and CacheError if the KV does not
    fit.

    A layer with a window keeps two windows of KV: the one before the end of the latest answer, and the one before the
    end of the latest prompt. So a conversation may go on from either end, and reads only its new tokens. A
    conversation that changes earlier tokens is read from its start.
    """

    def __init__(self, llm: LLM) -> None:
        if not isinstance(llm, LLM):
            raise TypeError(f"llm is of type {type(llm).__name__}; pass the LLM that is to answer: Session(LLM(...))")
        self.llm = llm
        target = llm.models.target
        capacity = target.config.context + llm.speculation.reach
        pool = SharedKV(llm.models, llm.speculation, 1, pages_for(capacity)).pool.new_rows(1)
        pool.reserve(0, capacity)
        self._memory = FullView(pool)
        self._cached_ids: list[int] = []
        self._window_snapshot = WindowSnapshot(pool)
        self._answering = Lock()

    def __repr__(self) -> str:
        return f"Session({self.llm!r})"

    def ask(
        self,
        conversation: str | Sequence[int],
        params: SamplingParams | None = None,
        on_prefill: OnPrefill | None = None,
    ) -> Generator[OutputChunk | RequestOutput, None, None]:
        """Continue a conversation: its whole text so far, or token ids such as `llm.encode_chat(messages)`.

        Yields chunks of the answer, then its `RequestOutput`, as `LLM.stream` does. params: n must be 1; None is
        `LLM.sampling_params()`. on_prefill: called with the number of prompt tokens read so far, and their total. A
        session gives one answer at a time: read the earlier answer to its end, close it or drop it before the next
        call. Raises TriforceError or TypeError.
        """
        params = params_of_one(params) or self.llm.sampling_params()
        if params.n != 1:
            raise RequestError(f"a session gives one answer at a time, not n = {params.n}; use LLM.generate")
        ids = self.llm.encode(one_prompt("ask", conversation))
        if not self._answering.acquire(blocking=False):
            raise RequestError(
                "this session is giving another answer; read that one to its end or close it, or make another Session"
            )
        try:
            output = yield from self._answer(ids, params, on_prefill)
        finally:
            self._answering.release()
        yield output

    def _answer(
        self, ids: list[int], params: SamplingParams, on_prefill: OnPrefill | None
    ) -> Generator[OutputChunk, None, RequestOutput]:
        # prompt log-probabilities score every position
        reusable = max(0, len(ids) - 1 - TAIL) if params.prompt_logprobs is None else 0
        # The pool may hold tokens past the end of the last answer, which were verified but cut off.
        cached_tokens = min(common_prefix(self._cached_ids, ids), reusable, int(self._memory.lengths_B[0]))
        self._window_snapshot.restore(0, cached_tokens)
        self._memory.rewind(ints([self._memory.rewind_length(0, cached_tokens)]))
        self._cached_ids = list(ids)
        with closing(self.llm.stream(ids, params, on_prefill=on_prefill, memory=self._memory)) as pieces:
            for piece in pieces:
                if isinstance(piece, RequestOutput):
                    return piece
                if len(self._cached_ids) == len(ids):
                    self._window_snapshot.take(0)
                self._cached_ids += piece.token_ids
                yield piece
        raise AssertionError("a stream ends with its output")
