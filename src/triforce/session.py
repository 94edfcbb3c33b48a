"""Session: a conversation whose KV is kept between turns, so that each turn reads only what is new."""

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
    """One row of target KV, as long as the model's context. Each turn gives the whole text, and its new end is read.

    Layers with a window keep those before the end of the latest text, and of the latest prompt: a turn that leaves out
    the answer reads what is new, and one that changes more reads all.
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
        self._seen: list[int] = []
        self._mark = WindowSnapshot(pool)
        self._answering = Lock()

    def __repr__(self) -> str:
        return f"Session({self.llm!r})"

    def ask(
        self,
        conversation: str | Sequence[int],
        params: SamplingParams | None = None,
        on_prefill: OnPrefill | None = None,
    ) -> Generator[OutputChunk | RequestOutput, None, None]:
        """Continue the whole conversation so far: a text, or token ids, such as `llm.encode_chat(messages)`.

        Yields what `LLM.stream` does; n must be 1. params: None is `LLM.sampling_params()`. One answer at a time: the
        one before is read to its end, or closed, or dropped, and then the session is in order for the next one. Raises
        TriforceError, or TypeError.
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
        reusable = max(0, len(ids) - 1 - TAIL) if params.prompt_logprobs is None else 0  # these score every position
        # The pool may hold tokens past the end of the last answer: those that were verified but cut off.
        kept = min(common_prefix(self._seen, ids), reusable, int(self._memory.lengths_B[0]))
        self._mark.restore(0, kept)
        self._memory.rewind(ints([self._memory.rewindable(0, kept)]))
        self._seen = list(ids)
        with closing(self.llm.stream(ids, params, on_prefill=on_prefill, memory=self._memory)) as pieces:
            for piece in pieces:
                if isinstance(piece, RequestOutput):
                    return piece
                if len(self._seen) == len(ids):
                    self._mark.take(0)
                self._seen += piece.token_ids
                yield piece
        raise AssertionError("a stream ends with its output")
