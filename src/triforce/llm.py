"""Text in, text out: the public face of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from triforce import kernels
from triforce.cache import PAGE, Full, Setting, saved
from triforce.checkpoint import Checkpoint, load
from triforce.checkpoint.tokenizer import configured_eos_ids
from triforce.completion import Completion, Piece
from triforce.engine import COUPLINGS, Batch, Job
from triforce.errors import ModelError, RequestError
from triforce.grammar import Grammar
from triforce.grammars import Grammars
from triforce.ladder import MODES, Ladder, Models, Speculation
from triforce.pairs import SHIPPED, draft_for
from triforce.planner import Costs, Focus
from triforce.profile import home, profile
from triforce.prompts import Prompt, known, one_or_many, token_ids
from triforce.request import CompletionOutput, RequestOutput, SamplingParams
from triforce.sampling import Constraint

MOST_ROWS = 8
"""Rows decoded together; where more are asked for, they take turns."""

OnPrefill = Callable[[int, int], None]
"""Told of the prompt tokens read so far, and of all there are."""


@dataclass(frozen=True, slots=True)
class Files:
    """Where to keep the KV cache of a prompt, and where to find an earlier one (see `cache.saved`)."""

    save: str | Path | None = None
    load: str | Path | None = None


@dataclass(slots=True)
class Request:
    """One prompt on its way to its outputs."""

    prompt: list[int]
    completions: list[Completion]
    outputs: list[CompletionOutput] = field(default_factory=list)
    bitwise: bool = False
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class LLM:
    """A target model, perhaps a draft, and how to speculate.

    model: a Hugging Face folder or hub name; None is the shipped pair. draft: the same; "auto" is the one that is
    known to fit, None is none. context: positions in tokens (None: what the model was made for). mode: one of `MODES`;
    None is `triforce` with a draft, else `retrieval`. coupling: `seeded`, `rejection` or `block`. gamma_1, gamma_2:
    tokens that the lowest tier proposes at a time, and that the middle one gathers. budget: KV tokens of the retrieval
    tier, or a share of the context ("3%"). chunk: tokens that are selected together. refresh: verifications between
    selections; 0 is once, "auto" after a refusal. full_layers: layers that the retrieval tier sees in full, such as
    "0,1" or "none"; "auto" finds those that need it. lower_tiers: "int8" has the tiers below the full one read weights,
    and committed KV of the target, as int8 copies; "same" does not. Raises ModelError or RequestError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | None = "auto",
        *,
        device: str = "auto",
        dtype: str = "auto",
        context: int | None = None,
        mode: str | None = None,
        coupling: str = "seeded",
        gamma_1: int = 2,
        gamma_2: int = 6,
        budget: str | int = 2048,
        chunk: int = PAGE,
        selection: str = "observed",
        refresh: str | int = 1,
        full_layers: str = "auto",
        lower_tiers: str = "same",
    ) -> None:
        retrieval = Setting.parse(budget, chunk, refresh, full_layers)
        self.speculation = Speculation(gamma_1, gamma_2, selection, retrieval, lower_tiers=lower_tiers)
        self.coupling = known("coupling", coupling, COUPLINGS)
        known("mode", mode or "ar", MODES)
        model = SHIPPED[0] if model is None else model
        read = partial(load, device=device, dtype=dtype, int8=self.speculation.int8)
        self.target = read(model, context=context)
        _require_layers(retrieval.full_layers, self.target.config.layers)
        draft = draft_for(model) if draft == "auto" else draft
        self.draft = read(draft) if draft is not None else None
        if self.draft:
            _require_same_vocabulary(self.target, self.draft)
        self.models = Models(self.target.decoder, self.draft.lower if self.draft else None, self.target.lower)
        self.tokenizer = self.target.tokenizer
        self._grammars = Grammars(self.tokenizer) if self.tokenizer else None
        self.costs = Costs(home(*(each.fingerprint for each in (self.target, self.draft) if each), lower_tiers))
        self.focus = Focus(coupling == "seeded") if retrieval.full_layers is None else None
        self.mode = mode or ("triforce" if self.draft else "retrieval")
        self._eos = frozenset(self.tokenizer.eos_ids if self.tokenizer else configured_eos_ids(self.target.path))

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

        save_cache keeps the KV of the first prompt in a file, load_cache starts every prompt from such a file as far as
        they begin alike. Raises TriforceError.
        """
        each = one_or_many(prompts)
        wanted = list(params) if isinstance(params, Sequence) else [params] * len(each)
        if len(wanted) != len(each):
            raise RequestError(
                f"{len(each)} prompts but {len(wanted)} sampling parameters; give one for each, or just one"
            )
        requests = [self._request(prompt, one or SamplingParams()) for prompt, one in zip(each, wanted, strict=True)]
        for _ in self._run(requests, mode, Files(save_cache, load_cache), on_prefill):
            pass
        return [self._output(request, mode) for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        mode: str | None = None,
        save_cache: str | Path | None = None,
        load_cache: str | Path | None = None,
        on_prefill: OnPrefill | None = None,
        memory: Full | None = None,
    ) -> Generator[Piece | RequestOutput, None, None]:
        """Continue one prompt, in pieces as they are ready; the last thing is the whole answer.

        memory: a target KV cache to go on with (see `session`), for n = 1. To give up half-way, close the generator, or
        raise in `on_prefill`: the KV goes at once.
        """
        request = self._request(prompt, params or SamplingParams())
        yield from self._run([request], mode, Files(save_cache, load_cache), on_prefill, memory)
        yield self._output(request, mode)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked. Raises RequestError."""
        return token_ids(prompt, self.target)

    def follow(self, grammar: Grammar) -> Constraint:
        """What holds one text to a grammar, which is compiled once. Raises RequestError for one that cannot be."""
        if self._grammars is None:
            raise RequestError("a grammar needs a tokenizer, and this model has none")
        return self._grammars.follow(grammar)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        ids = self.encode(prompt)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids")
        seed = secrets.randbits(32) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        constraints = [self.follow(params.grammar) if params.grammar else None for _ in range(params.n)]
        jobs = [Job(ids, params, seed, choice, stop_ids, constraint) for choice, constraint in enumerate(constraints)]
        return Request(ids, [Completion(job, self.tokenizer) for job in jobs])

    def _run(
        self,
        requests: Sequence[Request],
        mode: str | None,
        files: Files,
        on_prefill: OnPrefill | None,
        memory: Full | None = None,
    ) -> Iterator[Piece]:
        ladder = MODES[known("mode", mode or self.mode, MODES)]
        if files.save is not None:
            saved.require_writable(Path(files.save))
        rows = [(request, completion) for request in requests for completion in request.completions]
        for first in range(0, len(rows), MOST_ROWS):
            turn = rows[first : first + MOST_ROWS]
            yield from self._turn(turn, ladder, files if first == 0 else Files(load=files.load), on_prefill, memory)

    def _turn(
        self,
        rows: list[tuple[Request, Completion]],
        ladder: Ladder,
        files: Files,
        on_prefill: OnPrefill | None,
        memory: Full | None,
    ) -> Iterator[Piece]:
        """One batch, whose KV is given back when it is done."""
        completions = [completion for _, completion in rows]
        jobs = [completion.job for completion in completions]
        costs = self._known_costs() if ladder is MODES["auto"] else None
        batch = Batch(self.models, ladder, self.speculation, self.coupling, jobs, memory, costs, self.focus)
        self._prefill(batch, files, on_prefill)
        yield from _decode(batch, completions)
        if costs:
            costs.save()
        for b, (request, completion) in enumerate(rows):
            request.outputs.append(completion.output(batch, b))
        for request in {id(request): request for request, _ in rows}.values():
            request.bitwise = batch.bitwise
            request.prefill_seconds += batch.prefill_seconds
            request.decode_seconds += batch.decode_seconds

    def _known_costs(self) -> Costs:
        """What passes take, looked at for a moment where nothing is known yet."""
        if not self.costs.knows("full", "retrieval"):
            profile(self.models, self.speculation, self.costs)
        return self.costs

    def _prefill(self, batch: Batch, files: Files, on_prefill: OnPrefill | None) -> None:
        identity = kernels.identity(self.models.target.model, batch.top.cache.pool.memory)
        maker = saved.Maker(self.target.fingerprint, identity)
        if files.load is not None:
            batch.restore(saved.SavedCache(Path(files.load), maker))
        for seen, total in batch.prefill():
            if on_prefill:
                on_prefill(seen, total)
        if files.save is not None:
            saved.save(Path(files.save), maker, batch.top.cache, 0, batch.jobs[0].prompt)

    def _output(self, request: Request, mode: str | None) -> RequestOutput:
        job = request.completions[0].job
        return RequestOutput(
            prompt_token_ids=request.prompt,
            prompt_logprobs=job.prompt_logprobs if job.params.prompt_logprobs is not None else None,
            outputs=request.outputs,
            mode=mode or self.mode,
            coupling=self.coupling,
            exactness="bitwise" if request.bitwise else "distribution",
            prefill_seconds=request.prefill_seconds,
            decode_seconds=request.decode_seconds,
        )


def _decode(batch: Batch, completions: Sequence[Completion]) -> Iterator[Piece]:
    while not batch.done:
        for completion, count in zip(completions, batch.step(), strict=True):
            if count:
                yield completion.take(batch, count)


def _require_layers(asked: frozenset[int] | None, layers: int) -> None:
    if unknown := sorted(layer for layer in asked or () if layer >= layers):
        raise RequestError(f"full_layers names layer {unknown[0]}; the model's are 0 to {layers - 1}")


def _require_same_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    names = (str(target.path), str(draft.path))
    if target.tokenizer and draft.tokenizer:
        target.tokenizer.require_same_vocabulary(draft.tokenizer, names)
    elif target.config.vocab_size != draft.config.vocab_size:
        raise ModelError(
            f"{names[0]} has {target.config.vocab_size} tokens and {names[1]} {draft.config.vocab_size}; "
            "use a draft model with the target's own tokenizer"
        )
