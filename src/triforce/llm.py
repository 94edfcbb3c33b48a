"""LLM: text in, text out. The public interface of the engine."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self
from weakref import WeakSet

from triforce.backends.kernel_api import pages_for
from triforce.disk_cache.write_queue import DiskCacheSettings
from triforce.distributed.group import TPGroup, required_group
from triforce.engine import MAX_ITL, MOST_ROWS, inputs
from triforce.engine.engine import Engine, EngineLender, OutputChunk, OutputStream, Request, collected
from triforce.engine.engine_parts import EngineParts, compare
from triforce.engine.inputs import LLMInputs, Prompt, conversations, known, one_of, one_or_many, params_of_each
from triforce.engine.model_loader import load_pair, trim_heap
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_group import OnPrefill
from triforce.engine.text_fingerprint import text_fingerprint
from triforce.engine.tier_builder import COUPLINGS, MODES, SpeculativeConfig
from triforce.errors import RequestError, argument, require_integer
from triforce.interface.keyword_advice import advised
from triforce.interface.messages import Message
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams, drawn_seed
from triforce.kvcache import PAGE, FullView, OffloadConfig, RetrievalConfig
from triforce.structured_output.compiler import CompiledGrammar, GrammarCompiler

TURN = 256
"""Steps after which a text, of some hundred tokens or a thousand by then, makes room for those that wait."""


CLOSED = "this LLM is closed; make another LLM"
FORKED = (
    "this LLM was made before the fork, which copies none of its threads; make another LLM in this process, or start "
    "processes with multiprocessing's spawn"
)


class LLMLifetime:
    """The life of an LLM. Behind its end every attribute that it had but `close` raises RequestError."""

    engines: EngineLender

    def __init__(self) -> None:
        _LIVING.add(self)

    def __del__(self) -> None:
        self._end(CLOSED)
        trim_heap()

    def close(self) -> None:
        """Give back weights, KV and the disk cache, once what is queued for it is written. Harmless a second time.

        Texts that are being streamed end with RequestError, as all later calls do. `with LLM(...) as llm:` closes at
        its end.
        """
        engines = self.__dict__.get("engines")
        self._end(CLOSED)
        if engines:
            engines.close(CLOSED)
        trim_heap()

    def __enter__(self) -> Self:
        if self._over:
            raise RequestError(self._over)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("an LLM can be neither copied nor pickled; make another LLM")

    if not TYPE_CHECKING:  # a checker would take every misspelt name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name in self.__dict__.get("_lost", ()):
                raise RequestError(self._over)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _over(self) -> str:
        """Reason of the end; empty while it lives."""
        reason: str = self.__dict__.get("_reason", "")
        return reason

    def _end(self, reason: str) -> None:
        if not self._over:
            lost = frozenset(self.__dict__)
            self.__dict__.clear()
            self.__dict__.update(_reason=reason, _lost=lost)


_LIVING: WeakSet[LLMLifetime] = WeakSet()
_INHERITED: list[dict[str, Any]] = []
"""What LLMs of the process that was forked had. It is kept: what is freed would wait for threads that are not here."""


def _end_in_child() -> None:
    for llm in list(_LIVING):
        _INHERITED.append(dict(llm.__dict__))
        if engines := llm.__dict__.get("engines"):
            engines.abandon(FORKED)
        llm._end(FORKED)


os.register_at_fork(after_in_child=_end_in_child)


@advised
class LLM(LLMInputs, LLMLifetime):
    """A target model, perhaps a draft, and how to speculate.

    - model: a Hugging Face folder or hub name; None is the shipped pair.
    - draft: the same; "auto" is the one that is known to fit, None or "none" is none.
    - device, context: "auto" is cuda where present; positions in tokens (None: what the model was made for).
    - dtype, kv_dtype: of weights, and of keys and values: "int8" halves them, and is another model. "auto": as fits.
    - mode: one of `MODES`; `auto` chooses among the tiers there are as it goes.
    - coupling: `seeded`, `rejection` or `block`. Under the first the text of a seed is that of plain decoding. Under
      the others its law is; the text depends on the mode, and in `auto` on the clock.
    - draft_tokens, speculative_tokens: tokens that the lowest tier proposes at a time, and that the middle one gathers
      for one verification by the full tier (gamma_1 and gamma_2 of the paper). `auto` chooses them itself.
    - retrieval_budget: KV tokens that the retrieval tier reads, or a share of the context ("3%"). "auto" is 2,048, of
      which mode `auto` may take half or twice as many where KV is not offloaded.
    - retrieval_chunk, retrieval_policy: tokens that are selected together, and what selects them, one of `POLICIES`.
    - retrieval_refresh: verifications between selections; 0 is once, "auto" after a refusal.
    - searched_layers: layers that search the whole context for each token; "auto" finds those that need it. Layers
      that are named, such as "0,1", read all of it; "none" search.
    - lower_tiers: what tiers below the full one read: "int8" copies of weights and KV, "int4" weights, or the "same".
    - kv_offload: where KV lies that does not stay, "file" or "host" memory; "none": all of it stays.
    - kv_memory: bytes of KV that stay, or "512MiB" and the like; "auto": half of the free memory, 9/10 of a GPU's.
    - kv_resident_layers: how many layers stay whole; "auto" is as many as fit.
    - strict: on a GPU, where bits depend on the shape of a pass, all passes of the full tier have one shape, so that
      greedy and `seeded` texts are the same in every mode.
    - disk_cache: a folder that keeps prompts and answers, up to disk_cache_size bytes ("20GiB"), for this and other
      processes to start from. Its files reveal them. disk_cache_network: it may lie on a network's file system.
    - ranks: processes that share the target (see `distributed`); each makes the same calls and gets the same answers.

    Raises ModelError, RequestError, CacheError, RankError or TypeError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | None = "auto",
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        context: int | None = None,
        mode: str = "auto",
        coupling: str = "seeded",
        draft_tokens: int = 2,
        speculative_tokens: int = 6,
        retrieval_budget: str | int = "auto",
        retrieval_chunk: int = PAGE,
        retrieval_policy: str = "observed",
        retrieval_refresh: str | int = 1,
        searched_layers: str | Sequence[int] = "auto",
        lower_tiers: str = "same",
        kv_offload: str = "none",
        kv_memory: str | int = "auto",
        kv_resident_layers: str | int = "auto",
        strict: bool = False,
        disk_cache: str | Path | None = None,
        disk_cache_size: str | int = "20GiB",
        disk_cache_network: bool = False,
        ranks: TPGroup | None = None,
    ) -> None:
        super().__init__()
        ranks = required_group(ranks)
        retrieval = RetrievalConfig.parse(retrieval_budget, retrieval_chunk, retrieval_refresh, searched_layers)
        offload = OffloadConfig.parse(kv_offload, kv_memory, kv_resident_layers)
        given = draft_tokens, speculative_tokens, retrieval_policy, retrieval
        self.speculation = SpeculativeConfig(*given, lower_tiers=lower_tiers, strict=strict, offload=offload)
        self.coupling = known(argument("coupling"), coupling, COUPLINGS)
        self.mode = known(argument("mode"), mode, MODES)
        disk = DiskCacheSettings.parse(disk_cache, disk_cache_size, disk_cache_network, ranks)
        where: dict[str, Any] = {"device": device, "dtype": dtype, "kv_dtype": kv_dtype, "context": context}
        pair = load_pair(model, draft, self.speculation, **where, ranks=ranks)
        self.target = pair.target
        self.draft = pair.draft
        self.eagle_head = pair.eagle_head
        self.models = pair.decoders
        self.names = (pair.name, pair.draft_name)
        self.load_seconds = pair.load_seconds
        self.ranks = ranks
        self.tokenizer, self.grammars = self.target.tokenizer, GrammarCompiler(self.target.tokenizer)
        self.sampling_defaults = self.target.files.sampling_defaults()  # those that the model's makers advise
        self.fingerprint = text_fingerprint(pair, self.speculation, self.coupling, self.mode)
        profile = pair.profile(self.speculation)
        self.break_even = profile.break_even  # tells from which context on speculation pays, by what is known by then
        parts = EngineParts(pair, self.speculation, self.coupling, pair.cost_model(profile), disk.open())
        self.engines = EngineLender(parts)
        ranks.barrier()
        compare(ranks, "models, settings or kernels", (*pair.facts, self.speculation, self.coupling, self.mode))

    def __repr__(self) -> str:
        if self._over:
            return f"<{self._over}>"
        (model, draft), device = self.names, str(self.target.decoder.device)
        context = self.target.config.context
        return f"LLM({model=}, {draft=}, mode={self.mode!r}, {device=}, {context=})"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        mode: str | None = None,
        save_cache: str | Path | None = None,
        load_cache: str | Path | None = None,
        on_prefill: OnPrefill | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or several (text or token ids), each with its own parameters or all with the same ones.

        params: None is `sampling_params()`, as the model's makers advise. save_cache: a file for the KV of the first
        prompt. load_cache: such a file, which every prompt starts from as far as they begin alike. on_prefill: called
        with the prompt tokens read so far, and their total. use_tqdm: whether a bar counts the prompts; None: where
        there are several, on a terminal or in a notebook. Beginnings that prompts share with those of the last call
        are not read again. Returns an output for each prompt. Raises TriforceError, TypeError, or Interruption, which
        has the outputs that are done.
        """
        several = one_or_many(prompts)
        wanted = params_of_each(params, len(several))
        requests = []
        for i, (prompt, each) in enumerate(zip(several, wanted, strict=True)):
            with one_of("prompts", i, len(several)):
                requests.append(self.request(prompt, each, mode))
        if not requests:
            return []
        return collected(requests, self.engines.run(requests, on_prefill, save_cache, load_cache), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        mode: str | None = None,
        on_prefill: OnPrefill | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": ..., "content": ...}`.

        They are read as the server reads them: content may be parts of text, turns may have `tool_calls` or be those of
        a tool. The model's chat template lays them out, with the tools that it may call. params: None is
        `sampling_params(chat=True)`. For other values beside its defaults call `llm.chat(messages,
        llm.sampling_params(chat=True, max_tokens=40))`: `SamplingParams(max_tokens=40)` samples all tokens at
        temperature 1. The rest is as in `generate`. Returns an output for each conversation. Raises TriforceError,
        TypeError, or Interruption.
        """
        prompts = list[list[int]]()
        several = conversations(messages)
        for i, conversation in enumerate(several):
            with one_of("conversations", i, len(several)):
                prompts.append(inputs.token_ids(self.encode_chat(conversation, tools), self.target))
        wanted = [each or self.sampling_params(chat=True) for each in params_of_each(params, len(prompts))]
        return self.generate(prompts, wanted, mode=mode, on_prefill=on_prefill, use_tqdm=use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        mode: str | None = None,
        save_cache: str | Path | None = None,
        load_cache: str | Path | None = None,
        on_prefill: OnPrefill | None = None,
        memory: FullView | None = None,
    ) -> Generator[OutputChunk | RequestOutput, None, None]:
        """Continue one prompt. Yields pieces of text as they are ready, and at last the whole output.

        `"".join(map(str, llm.stream(prompt)))` is the text: the `str` of a piece is its text, that of the output empty.
        memory: a view of the target's KV to go on with, as a `Session` has, for n = 1. Closing the generator, or an
        error from `on_prefill`, ends the text at once and frees its KV. Raises TriforceError, or TypeError.
        """
        request = self.request(inputs.one_prompt("stream", prompt), params, mode)
        for _, event in self.engines.run([request], on_prefill, save_cache, load_cache, memory):
            yield event

    def reset_prefix_cache(self) -> None:
        """Forget the prompts that `generate` and `stream` have read, and give back their memory."""
        self.engines.clear()

    def open(
        self,
        rows: int = MOST_ROWS,
        kv_tokens: int | None = None,
        turn: int | None = TURN,
        max_itl: float = MAX_ITL,
    ) -> Engine:
        """Return an engine for requests that come and go. It keeps its memory, and is for one thread at a time.

        rows: texts at a time. kv_tokens: tokens that their KV has room for; None is the model's context. turn: steps
        after which a request makes room for those that wait; None: it never does. max_itl: inter-token latency in
        seconds, up to which other prompts are read between two steps of a text. Where several ranks share the model
        each of them opens one, and does the same with it (see `server.engine_thread`). Raises RequestError, CacheError
        or RankError.
        """
        require_integer("rows", rows, 1)
        for name, limit in (("kv_tokens", kv_tokens), ("turn", turn)):
            if limit is not None:
                require_integer(name, limit, 1)
        if not isinstance(max_itl, int | float) or not max_itl >= 0:
            raise RequestError(f"{argument('max_itl')} must be a number of seconds, not {max_itl!r}")
        slack = rows * pages_for(self.speculation.reach + PAGE)
        pages = pages_for(kv_tokens or self.target.config.context) + slack
        compare(self.ranks, "limits", (rows, pages, turn))
        return Engine(self.engines.parts, rows, pages, turn, max_itl)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        mode: str | None = None,
        scope: str | None = "",
        compiled: CompiledGrammar | None = None,
    ) -> Request:
        """Return a request for `Engine.submit`. scope: whose it is; cached prompts are shared within a scope only.

        With the scope None it neither starts from cached prompts nor leaves any. compiled: the grammar of `params`,
        where that was compiled before. Raises RequestError, or TypeError.
        """
        params = inputs.params_of_one(params) or self.sampling_params()
        ids = self.encode(inputs.one_prompt("request", prompt))
        mode = known(argument("mode"), mode or self.mode, MODES)
        inputs.require_servable(params, self.target)
        seed = self.ranks.broadcast(drawn_seed()) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_ids)
        if params.grammar:
            compiled = compiled or self.grammars.compile(params.grammar)
        held = [compiled.follow() if compiled else None for _ in range(params.n)]
        sequences = [TokenSequence(ids, params, seed, i, stop_ids, scope, one) for i, one in enumerate(held)]
        streams = [OutputStream(sequence, self.tokenizer) for sequence in sequences]
        return Request(ids, streams, mode, self.coupling, text=prompt if isinstance(prompt, str) else None)
