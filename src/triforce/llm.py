"""LLM: text in, text out. The public interface of the engine."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self
from weakref import WeakSet

from triforce.backends.kernel_api import pages_for
from triforce.checkpoint.named_templates import read_chat_template, set_chat_template
from triforce.disk_cache.write_queue import DiskCacheSettings
from triforce.distributed.group import TPGroup, required_group
from triforce.engine import MAX_ITL, MAX_ROWS, inputs
from triforce.engine.engine import Engine, EngineLender, OutputChunk, OutputStream, Request, collect_outputs
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
from triforce.interface.sampling_params import SamplingParams, random_seed
from triforce.kvcache import PAGE, FullView, OffloadConfig, RetrievalConfig
from triforce.structured_output.compiler import CompiledGrammar, GrammarCompiler

TURN = 256
"""Engine steps, of some hundred to a thousand tokens, after which a running text yields its row to waiting requests."""


CLOSED = "this LLM is closed; make another LLM"
FORKED = (
    "this LLM was made before the fork, which copies none of its threads; make another LLM in this process, or start "
    "processes with multiprocessing's spawn"
)


class LLMLifetime:
    """Lifetime of an LLM. After its end all of its attributes except `close` raise RequestError."""

    engines: EngineLender

    def __init__(self) -> None:
        _LIVE_LLMS.add(self)

    def __del__(self) -> None:
        self._end(CLOSED)
        trim_heap()

    def close(self) -> None:
        """Write the queued entries of the disk cache, then free weights, KV and the disk cache. Idempotent.

        Running streams end with RequestError, and so do all later calls. `with LLM(...) as llm:` closes at its end.
        """
        engines = self.__dict__.get("engines")
        self._end(CLOSED)
        if engines:
            engines.close(CLOSED)
        trim_heap()

    def __enter__(self) -> Self:
        if self._end_reason:
            raise RequestError(self._end_reason)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("an LLM can be neither copied nor pickled; make another LLM")

    if not TYPE_CHECKING:  # with `__getattr__` a type checker accepts every misspelt attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name in self.__dict__.get("_ended_attributes", ()):
                raise RequestError(self._end_reason)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _end_reason(self) -> str:
        """Reason why this LLM has ended; empty while it is usable."""
        reason: str = self.__dict__.get("_reason", "")
        return reason

    def _end(self, reason: str) -> None:
        if not self._end_reason:
            attribute_names = frozenset(self.__dict__)
            self.__dict__.clear()
            self.__dict__.update(_reason=reason, _ended_attributes=attribute_names)


_LIVE_LLMS: WeakSet[LLMLifetime] = WeakSet()
_PARENT_ATTRIBUTES: list[dict[str, Any]] = []
"""Attributes of the parent process's LLMs, never freed in a child: freeing them waits for threads that do not exist."""


def _end_in_child() -> None:
    for llm in list(_LIVE_LLMS):
        _PARENT_ATTRIBUTES.append(dict(llm.__dict__))
        if engines := llm.__dict__.get("engines"):
            engines.abandon(FORKED)
        llm._end(FORKED)


os.register_at_fork(after_in_child=_end_in_child)


@advised
class LLM(LLMInputs, LLMLifetime):
    """A target model, an optional draft model, and the configuration of speculation.

    - model: a Hugging Face folder or hub name; None is the shipped pair.
    - draft: a folder or hub name; "auto" is the draft known to fit the target, None or "none" is no draft.
    - device: "auto" is cuda where present.
    - context: positions in tokens; None is the context that the model was trained for.
    - dtype: of the weights; "auto" is bfloat16, but float16 on a GPU before Ampere, and float32 on a CPU without native
      kernels for the model.
    - kv_dtype: of keys and values; "auto" is `dtype`. "int8" halves the size of KV and changes the model's output.
    - weight_inputs: type to which products with packed weights round their inputs. "int8" is faster for o, gate and up
      projections, and changes the model's output. Draft models always take it.
    - mode: one of `MODES`; `auto` chooses among the available tiers while it generates.
    - coupling: `seeded`, `rejection` or `block`. With `seeded` a seed gives the same text as plain decoding.
      With the others only the distribution is the same. A seed's text then depends on the mode, in `auto` on timing.
    - draft_tokens, speculative_tokens: gamma_1 and gamma_2 of the paper. The lowest tier proposes draft_tokens at a
      time. The middle tier gathers speculative_tokens for one verification by the full tier. `auto` chooses both.
    - retrieval_budget: KV tokens that the retrieval tier reads, or a share of the context ("3%"). "auto" is 2,048.
      Mode `auto` may also choose 1,024 or 4,096, unless KV is offloaded.
    - retrieval_chunk, retrieval_policy: tokens that are selected together, and the selection policy, one of `POLICIES`.
    - retrieval_refresh: verifications between selections; 0 selects once, "auto" selects after a rejection.
    - searched_layers: layers that search the whole context for each token; "auto" finds the layers that need it. Named
      layers, such as "0,1", read the whole context; "none" disables the search.
    - lower_tiers: precision of the tiers below the full one: "int8" copies of weights and KV, "int4" weights, or
      "same".
    - kv_offload: storage of KV beyond kv_memory: "file" or "host" memory; "none" keeps all KV resident.
    - kv_memory: bytes of resident KV, or a size such as "512MiB"; "auto" is half of the free memory, 9/10 on a GPU.
    - kv_resident_layers: number of layers that stay resident as a whole; "auto" is as many as fit.
    - strict: on a GPU results depend in their last bits on the shape of a pass. With strict all passes of the full tier
      have one shape, so greedy and `seeded` texts are identical in every mode.
    - chat_template: a file with a chat template, or one of the common forms by name ("chatml", "gemma", "llama3",
      "mistral", "plain"), in place of that of the model's files.
    - disk_cache: a folder that stores KV of prompts and answers, up to disk_cache_size bytes ("20GiB"), for reuse by
      this and other processes. Its files reveal the texts. disk_cache_network allows a network file system.
    - ranks: processes that share the target (see `distributed`). Each makes the same calls and gets the same answers.

    Attributes, which callers read and do not set:

    - target, draft: the loaded models, each a `Checkpoint`; draft is None without a draft model.
    - eagle_head: the EAGLE head with its path and fingerprint; None without one.
    - tokenizer: the `Tokenizer` of the target; None in a folder without one, where prompts are token ids.
    - names: display names of the target and of its draft; the second is None without a draft.
    - mode, coupling: names, as passed.
    - speculation: the checked settings of tiers, selection and offload.
    - sampling_defaults: values of the model's own files by field of `SamplingParams`.
    - break_even: a function without parameters. It returns the `BreakEvenPoint` of these models on this machine.
    - fingerprint: hex digest. Engines with equal digests generate the same text from a seed.
    - load_seconds: seconds of reading the files onto the device.
    - models, grammars, engines: decoders of the tiers, compiled grammars and idle engines, as the methods use them.

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
        weight_inputs: str = "int16",
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
        chat_template: str | Path | None = None,
        disk_cache: str | Path | None = None,
        disk_cache_size: str | int = "20GiB",
        disk_cache_network: bool = False,
        ranks: TPGroup | None = None,
    ) -> None:
        super().__init__()
        ranks = required_group(ranks)
        retrieval = RetrievalConfig.parse(retrieval_budget, retrieval_chunk, retrieval_refresh, searched_layers)
        offload = OffloadConfig.parse(kv_offload, kv_memory, kv_resident_layers)
        tier_settings = draft_tokens, speculative_tokens, retrieval_policy, retrieval
        self.speculation = SpeculativeConfig(*tier_settings, lower_tiers=lower_tiers, strict=strict, offload=offload)
        self.coupling = known(argument("coupling"), coupling, COUPLINGS)
        self.mode = known(argument("mode"), mode, MODES)
        disk = DiskCacheSettings.parse(disk_cache, disk_cache_size, disk_cache_network, ranks)
        load_options: dict[str, Any] = {
            "device": device, "dtype": dtype, "kv_dtype": kv_dtype, "weight_inputs": weight_inputs, "context": context,
        }  # fmt: skip
        template = None if chat_template is None else read_chat_template(chat_template)
        pair = load_pair(model, draft, self.speculation, **load_options, ranks=ranks)
        self.target = pair.target
        self.draft = pair.draft
        self.eagle_head = pair.eagle_head
        self.models = pair.decoders
        self.names = (pair.name, pair.draft_name)
        self.load_seconds = pair.load_seconds
        self.ranks = ranks
        self.tokenizer = self.target.tokenizer
        if template is not None:
            set_chat_template(self.tokenizer, template)
        self.grammars = GrammarCompiler(self.target.tokenizer)
        self.sampling_defaults = self.target.files.sampling_defaults()  # from the model's own files
        self.fingerprint = text_fingerprint(pair, self.speculation, self.coupling, self.mode)
        profile = pair.profile(self.speculation)
        self.break_even = profile.break_even  # context from which speculation pays, by the measurements so far
        parts = EngineParts(pair, self.speculation, self.coupling, pair.cost_model(profile), disk.open())
        self.engines = EngineLender(parts)
        ranks.barrier()
        compare(ranks, "models, settings or kernels", (*pair.facts, self.speculation, self.coupling, self.mode))

    def __repr__(self) -> str:
        if self._end_reason:
            return f"<{self._end_reason}>"
        model, draft = self.names
        device = str(self.target.decoder.device)
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
        """Continue one prompt or several (text or token ids), with one set of parameters or one for each prompt.

        params: None is `sampling_params()`, the defaults of the model's files. save_cache: a file to write the KV of
        the first prompt to. load_cache: such a file; a prompt reuses the KV of its common prefix with the saved prompt.
        on_prefill: called with the number of prompt tokens read so far, and their total. use_tqdm: whether to show a
        progress bar over prompts; None shows it for several prompts, on a terminal or in a notebook. A prefix
        that a prompt shares with a prompt of the previous call is not read again. Returns one output for each prompt.
        Raises TriforceError, TypeError, or Interruption, which holds the finished outputs.
        """
        prompt_batch = one_or_many(prompts)
        batch_params = params_of_each(params, len(prompt_batch))
        requests = []
        for i, (prompt, prompt_params) in enumerate(zip(prompt_batch, batch_params, strict=True)):
            with one_of("prompts", i, len(prompt_batch)):
                requests.append(self.request(prompt, prompt_params, mode))
        if not requests:
            return []
        return collect_outputs(requests, self.engines.run(requests, on_prefill, save_cache, load_cache), use_tqdm)

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

        Messages are parsed as the server parses them: content may be a list of text parts, and turns may have
        `tool_calls` or the role tool. The model's chat template formats them, with `tools` that the model may call.
        Fields of messages that the template does not read are refused, except fields that clients add to answers.
        params: None is `sampling_params(chat=True)`. `llm.sampling_params(chat=True, max_tokens=40)` changes one value
        of these defaults. `SamplingParams(max_tokens=40)` drops the defaults: it samples at temperature 1. Other
        arguments are as in `generate`. Returns one output for each conversation. Raises TriforceError, TypeError, or
        Interruption.
        """
        prompts = list[list[int]]()
        conversation_batch = conversations(messages)
        for i, conversation in enumerate(conversation_batch):
            with one_of("conversations", i, len(conversation_batch)):
                prompts.append(inputs.token_ids(self.encode_chat(conversation, tools), self.target))
        batch_params = [
            chat_params or self.sampling_params(chat=True) for chat_params in params_of_each(params, len(prompts))
        ]
        return self.generate(prompts, batch_params, mode=mode, on_prefill=on_prefill, use_tqdm=use_tqdm)

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
        """Continue one prompt. Yields chunks of text as they are ready, then the whole output.

        `"".join(map(str, llm.stream(prompt)))` is the text: the `str` of a chunk is its text, and the `str` of the
        output is empty.
        memory: a view of the target's KV to continue from, as `Session` passes it, for n = 1. Closing the generator, or
        an error from `on_prefill`, ends the text at once and frees its KV. Raises TriforceError or TypeError.
        """
        request = self.request(inputs.one_prompt("stream", prompt), params, mode)
        for _, event in self.engines.run([request], on_prefill, save_cache, load_cache, memory):
            yield event

    def reset_prefix_cache(self) -> None:
        """Drop the cached prompts of `generate` and `stream`, and free their memory."""
        self.engines.clear()

    def open(
        self,
        rows: int = MAX_ROWS,
        kv_tokens: int | None = None,
        turn: int | None = TURN,
        max_itl: float = MAX_ITL,
    ) -> Engine:
        """Return an engine with continuous batching. It allocates its KV once, and serves one thread at a time.

        rows: sequences decoded at a time. kv_tokens: capacity of their KV in tokens; None is the model's context.
        turn: steps after which a running request yields its place to waiting ones; None: never. max_itl: limit of
        the inter-token latency in seconds; the prefill of other prompts delays a running text at most that long. Where
        several ranks share the model each rank opens an engine and makes the same calls (see `server.engine_thread`).
        Raises RequestError, CacheError or RankError.
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
        token_texts: Mapping[int, str] | None = None,
    ) -> Request:
        """Return a request for `Engine.submit`.

        scope: the owner of the request; cached prompts are shared within a scope only. None neither reuses cached
        prompts nor stores any. compiled: the grammar of `params`, where it is compiled already. token_texts: texts by
        id of tokens that the output shows with another text than their own. Raises RequestError or TypeError.
        """
        params = inputs.params_of_one(params) or self.sampling_params()
        ids = self.encode(inputs.one_prompt("request", prompt))
        mode = known(argument("mode"), mode or self.mode, MODES)
        inputs.require_servable(params, self.target)
        seed = self.ranks.broadcast(random_seed()) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_ids)
        if self.tokenizer:
            stop_ids |= self.tokenizer.control_tokens.ids_in(params.stop)
        if params.grammar:
            compiled = compiled or self.grammars.compile(params.grammar)
        matchers = [compiled.follow() if compiled else None for _ in range(params.n)]
        sequences = [
            TokenSequence(ids, params, seed, i, stop_ids, scope, matcher) for i, matcher in enumerate(matchers)
        ]
        streams = [OutputStream(sequence, self.tokenizer, token_texts) for sequence in sequences]
        text = prompt if isinstance(prompt, str) else None
        return Request(self.engines.parts, ids, streams, mode, self.coupling, text=text)
