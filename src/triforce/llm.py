"""Text in, text out: the public face of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from triforce.checkpoint.known_drafts import SHIPPED, draft_for
from triforce.checkpoint.sampling_defaults import sampling_defaults
from triforce.checkpoint.tokenizer import configured_eos_ids
from triforce.distributed.group import ALONE, TPGroup
from triforce.engine.batch import COUPLINGS
from triforce.engine.config import SpeculativeConfig
from triforce.engine.engine import Engine, Request
from triforce.engine.inputs import Message, Prompt, conversations, known, one_or_many, token_ids
from triforce.engine.model_loader import Checkpoint, load
from triforce.engine.modes import MODES, runnable
from triforce.engine.output_stream import OutputChunk, OutputStream
from triforce.engine.prefill_pacer import MAX_ITL
from triforce.engine.release import trim_heap
from triforce.engine.runs import MOST_ROWS, PromptCachePaths, Runs, compare
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_group import OnPrefill
from triforce.engine.tier_builder import ModelSet
from triforce.errors import ModelError, RequestError
from triforce.interface.grammar import Grammar
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import PAGE, FullView, OffloadConfig, RetrievalConfig
from triforce.kvcache.pool import pages_for
from triforce.model.config import ModelConfig
from triforce.planner import CostModel
from triforce.planner.cost_file import costs_path
from triforce.sampling import Constraint
from triforce.structured_output.compiler import Grammars

TURN = 256
"""Steps of a text, some hundred tokens or a thousand, after which it makes room for those who wait."""


class LLM:
    """A target model, perhaps a draft, and how to speculate.

    - model: a Hugging Face folder or hub name; None is the shipped pair.
    - draft: the same; "auto" is the one that is known to fit, None is none.
    - context: positions in tokens (None: what the model was made for).
    - mode: one of `MODES`; `auto` chooses among the tiers there are as it goes.
    - coupling: `seeded`, `rejection` or `block`. Under the first the text of a seed is that of plain decoding. Under
      the others its law is; the text depends on the mode, and in `auto` on the clock.
    - draft_tokens, speculative_tokens: what the lowest tier proposes at a time, and what one verification by the full
      tier reads (draft_tokens and speculative_tokens of the paper). `auto` chooses them itself.
    - retrieval_budget: KV tokens that the retrieval tier reads, or a share of the context ("3%"). "auto" is 2,048, of
      which mode `auto` may take half or twice as many where KV is not offloaded.
    - retrieval_chunk: tokens that are selected together.
    - retrieval_policy: what selects, one of `POLICIES`.
    - retrieval_refresh: verifications between selections; 0 is once, "auto" after a refusal.
    - searched_layers: layers that search the whole context for each token; "auto" finds those that need it. Layers
      that are named, such as "0,1", read all of it; "none" search.
    - lower_tiers: "int8": the tiers below the full one read int8 copies of weights and committed KV; "same": not so.
    - kv_offload: where KV lies that does not stay, "file" or "host" memory; "none": all of it stays.
    - kv_memory: bytes of KV that stay, or "512MiB" and the like; "auto": half of the free memory, 9/10 of a GPU's.
    - kv_resident_layers: how many layers stay whole; "auto" is as many as fit.
    - strict: on a GPU, where bits depend on the shape of a pass, all passes of the full tier have one shape, so that
      greedy and `seeded` texts are the same in every mode.
    - ranks: the processes that share the target (see `distributed`); each makes the same calls and has the same
      answers.

    Raises ModelError, RequestError or RankError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | None = "auto",
        *,
        device: str = "auto",
        dtype: str = "auto",
        context: int | None = None,
        mode: str = "auto",
        coupling: str = "seeded",
        draft_tokens: int = 2,
        speculative_tokens: int = 6,
        retrieval_budget: str | int = "auto",
        retrieval_chunk: int = PAGE,
        retrieval_policy: str = "observed",
        retrieval_refresh: str | int = 1,
        searched_layers: str = "auto",
        lower_tiers: str = "same",
        kv_offload: str = "none",
        kv_memory: str | int = "auto",
        kv_resident_layers: str | int = "auto",
        strict: bool = False,
        ranks: TPGroup = ALONE,
    ) -> None:
        self.ranks = ranks
        retrieval = RetrievalConfig.parse(retrieval_budget, retrieval_chunk, retrieval_refresh, searched_layers)
        offload = OffloadConfig.parse(kv_offload, kv_memory, kv_resident_layers)
        self.speculation = SpeculativeConfig(
            draft_tokens,
            speculative_tokens,
            retrieval_policy,
            retrieval,
            lower_tiers=lower_tiers,
            strict=strict,
            offload=offload,
        )
        self.coupling = known("coupling", coupling, COUPLINGS)
        self.mode = known("mode", mode, MODES)
        model = SHIPPED[0] if model is None else model
        began = perf_counter()
        read = partial(load, device=device, dtype=dtype, int8=self.speculation.int8)
        self.target = read(model, context=context, ranks=ranks)
        _require_layers(retrieval.searched_layers, self.target.config.layers)
        draft = draft_for(model) if draft == "auto" else draft
        self.draft = read(draft, beside=self.target) if draft is not None else None
        self.load_seconds = perf_counter() - began
        """What reading the models took."""
        if self.draft:
            _require_same_vocabulary(self.target, self.draft)
        self.models = ModelSet(self.target.decoder, self.draft.lower if self.draft else None, self.target.lower)
        self.tokenizer = self.target.tokenizer
        self._grammars = Grammars(self.tokenizer) if self.tokenizer else None
        prints = [each.fingerprint for each in (self.target, self.draft) if each]
        names = *prints, lower_tiers, *([f"{ranks.count} ranks"] if ranks.count > 1 else [])
        if kv_offload != "none":
            names = *names, kv_offload, str(kv_memory), str(kv_resident_layers)
        where = self.target.decoder.device, self.target.decoder.dtype
        costs = CostModel(costs_path([*names], *where) if ranks.rank == 0 else None)
        self.sampling_defaults = sampling_defaults(self.target.path)
        """What the model's makers set of `SamplingParams`."""
        self._eos = frozenset(self.tokenizer.eos_ids if self.tokenizer else configured_eos_ids(self.target.path))
        self.runs = Runs(self.models, self.speculation, self.coupling, costs, self.target.fingerprint)
        ranks.meet()
        config = [getattr(self.target.config, f.name) for f in fields(ModelConfig) if f.name != "rope"]
        about = config, self.target.decoder.dtype, prints[1:], self.speculation, self.coupling, self.mode
        compare(ranks, "models, settings or kernels", about)

    def __del__(self) -> None:
        self.__dict__.clear()
        trim_heap()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        mode: str | None = None,
        save_cache: str | Path | None = None,
        load_cache: str | Path | None = None,
        on_prefill: OnPrefill | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or several (text or token ids), each with its own parameters or all with the same ones.

        params: None is `sampling_params()`, what the model's makers advise. What the prompts of the last call have in
        common with these is not read again.
        save_cache keeps the KV of the first prompt in a file, load_cache starts every prompt from such a file as far as
        they begin alike. Raises TriforceError.
        """
        each = one_or_many(prompts)
        wanted = list(params) if isinstance(params, Sequence) else [params] * len(each)
        for one in wanted:
            _require_params(one)
        if len(wanted) != len(each):
            raise RequestError(
                f"{len(each)} prompts but {len(wanted)} sampling parameters; give one for each, or just one"
            )
        requests = [
            self.request(prompt, one or self.sampling_params(), mode) for prompt, one in zip(each, wanted, strict=True)
        ]
        events = self.runs.run(requests, PromptCachePaths(save_cache, load_cache), on_prefill)
        outputs = {request: event for request, event in events if isinstance(event, RequestOutput)}
        return [outputs[request] for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        mode: str | None = None,
        on_prefill: OnPrefill | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": ..., "content": ...}`.

        The model's chat template lays them out; the rest is as in `generate`. Raises TriforceError, or TypeError.
        """
        prompts = [self.encode_chat(each) for each in conversations(messages)]
        return self.generate(prompts, params, mode=mode, on_prefill=on_prefill)

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
        """Continue one prompt, in pieces as they are ready; the last thing is the whole answer.

        memory: a target KV cache to go on with (see `session`), for n = 1. To give up half-way, close the generator, or
        raise in `on_prefill`: the KV goes at once.
        """
        _require_params(params)
        request = self.request(prompt, params or self.sampling_params(), mode)
        for _, event in self.runs.run([request], PromptCachePaths(save_cache, load_cache), on_prefill, memory):
            yield event

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Return `SamplingParams` with these values, and of the others those of generation_config.json.

        Raises RequestError.
        """
        return SamplingParams(**(self.sampling_defaults | given))

    @property
    def modes(self) -> list[str]:
        """Those of `MODES` that these models can run."""
        return runnable(self.models)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked. Raises RequestError."""
        return token_ids(prompt, self.target)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that awaits its answer. Raises RequestError."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer, and so no chat template; give token ids to generate")
        return self.tokenizer.chat(messages)

    def reset_prefix_cache(self) -> None:
        """Forget the prompts that `generate` and `stream` have read, and give their memory back."""
        self.runs.clear()

    def follow(self, grammar: Grammar) -> Constraint:
        """What holds one text to a grammar, which is compiled once. Raises RequestError for one that cannot be."""
        if self._grammars is None:
            raise RequestError("a grammar needs a tokenizer, and this model has none")
        return self._grammars.follow(grammar)

    def open(
        self,
        rows: int = MOST_ROWS,
        kv_tokens: int | None = None,
        turn: int | None = TURN,
        max_itl: float = MAX_ITL,
    ) -> Engine:
        """An engine for requests that come and go: `rows` texts at a time, whose KV has room for so many tokens.

        None is the model's context. It keeps that memory as long as it lives, and is for one thread at a time. `turn`:
        steps after which a request makes room for those who wait, if there is none; None: it never does. max_itl: the
        inter-token latency, in seconds, up to which other prompts are read between two steps of a text. Where several
        ranks share the model each of them opens one, and does the same with it (see `server.crew`).
        """
        slack = rows * pages_for(self.speculation.reach + PAGE)
        pages = pages_for(kv_tokens or self.target.config.context) + slack
        compare(self.ranks, "limits", (rows, pages, turn))
        return self.runs.start(rows, pages, turn, max_itl)

    def request(self, prompt: Prompt, params: SamplingParams, mode: str | None = None, scope: str = "") -> Request:
        """What `Engine.submit` takes. `scope`: whose it is; others cannot find out by timing what was read before.

        Raises RequestError.
        """
        ids, mode = self.encode(prompt), known("mode", mode or self.mode, MODES)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids")
        seed = self.ranks.agree(secrets.randbits(32)) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        constraints = [self.follow(params.grammar) if params.grammar else None for _ in range(params.n)]
        jobs = [
            TokenSequence(ids, params, seed, choice, stop_ids, scope, constraint)
            for choice, constraint in enumerate(constraints)
        ]
        return Request(ids, [OutputStream(job, self.tokenizer) for job in jobs], mode, self.coupling)


def _require_params(params: object) -> None:
    if not (params is None or isinstance(params, SamplingParams)):
        given = "SamplingParams(max_tokens=3), say"
        raise TypeError(f"params is a {type(params).__name__}; pass {given}, a list of them, or None")


def _require_layers(asked: frozenset[int] | None, layers: int) -> None:
    if unknown := sorted(layer for layer in asked or () if layer >= layers):
        raise RequestError(f"searched_layers names layer {unknown[0]}; the model's are 0 to {layers - 1}")


def _require_same_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    names = (str(target.path), str(draft.path))
    if target.tokenizer and draft.tokenizer:
        target.tokenizer.require_same_vocabulary(draft.tokenizer, names)
    elif target.config.vocab_size != draft.config.vocab_size:
        raise ModelError(
            f"{names[0]} has {target.config.vocab_size} tokens and {names[1]} {draft.config.vocab_size}; "
            "use a draft model with the target's own tokenizer"
        )
