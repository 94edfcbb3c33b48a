"""`triforce generate`: continue a text."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from triforce.cli import tensor_parallel
from triforce.cli.answer_output import Painter, cut_form, legend, of_chats, report, show
from triforce.cli.asked_prompt import asked_of
from triforce.cli.engine_arguments import load, sampling
from triforce.cli.parser import CANNOT_CHAT, CHATS
from triforce.cli.progress import Prefill, Tokenization
from triforce.cli.text_files import require_writable
from triforce.distributed.group import TPGroup
from triforce.errors import RequestError
from triforce.interface.explain import json_value
from triforce.interface.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from triforce.interface.sampling_params import SamplingParams


def run(options: Namespace) -> int:
    """Run in one process, or in several that share the model."""
    return tensor_parallel.run(options, generate)


def generate(options: Namespace, ranks: TPGroup) -> int:
    """Generate; rank 0 reads and prints. Raises RequestError, for prompt and parameters before a model is loaded."""
    read: Any = None if ranks.rank else _checked(options)
    given, options.model, prompt = ranks.broadcast(read)
    asked = [{"role": "user", "content": "?"}] if options.chat else None
    llm = load(options, ranks if ranks.count > 1 else None, asked)
    if options.chat and not (llm.tokenizer and llm.tokenizer.chats):
        raise RequestError("this model has no chat template; leave out --chat, or give a model that has one")
    params = llm.sampling_params(chat=options.chat, **given)
    if options.chat and not (ranks.rank or options.quiet) and sys.stderr.isatty():
        print(f"sampling: {of_chats(llm.sampling_defaults, given)}", file=sys.stderr)
    with Tokenization(options.quiet or ranks.rank > 0):
        ids = llm.encode_chat([{"role": "user", "content": prompt}]) if options.chat else llm.encode(prompt)
    if ranks.rank:
        llm.generate(ids, params)
        return 0
    saved = {"save_cache": options.save_cache, "load_cache": options.load_cache}
    progress = Prefill(options.quiet)
    output: RequestOutput | None
    if options.json or params.n > 1:
        with progress:
            (output,) = llm.generate(ids, params, **saved, on_prefill=progress)
    else:
        pieces = llm.stream(ids, params, **saved, on_prefill=progress)
        _, output = show(pieces, Painter(llm.tokenizer, ids) if options.color else None, progress)
    assert output is not None, "a stream ends with the whole answer"
    if options.json:
        print(json.dumps(as_json(output, params, ranks.count), ensure_ascii=False, allow_nan=False))
    elif params.n > 1:  # one after the other, and uncoloured: as streams they would mix
        for completion in output.outputs:
            print(f"[{completion.index + 1} of {params.n}]\n{completion.text}")
    if cut := cut_form(output, params, llm.grammars):
        print(cut, file=sys.stderr)
    if options.quiet or options.json:
        return 0
    if options.color:
        print(legend(output.outputs[0].tiers), file=sys.stderr)
    print(report(output), file=sys.stderr)
    if llm.tokenizer and llm.tokenizer.chats and not options.chat:
        print("This model has a chat template: with --chat the PROMPT is asked as in a chat.", file=sys.stderr)
    return 0


def _checked(options: Namespace) -> tuple[dict[str, Any], str | None, str]:
    """Return sampling parameters, the model and the prompt. Raises RequestError, also for what would do nothing."""
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(options, name) is not None and not options.json:
            raise RequestError(f"--{name.replace('_', '-')} is listed in the JSON; add --json, or leave it out")
    given = sampling(options)
    asked = asked_of(options)
    if options.chat and asked.model is None:
        raise RequestError(f"{CANNOT_CHAT}; leave out --chat, or {CHATS}")
    require_writable(options.save_cache, "--save-cache")
    asked.tell(options)
    return given, asked.model, asked.prompt


def as_json(output: RequestOutput, params: SamplingParams, ranks: int = 1) -> dict[str, Any]:
    """The object that --json prints; its text, ids, seed and tiers are those of the first continuation.

    `ranks`: how many processes made it.
    """
    first = output.outputs[0]
    whole = (
        _fields(first, "text", "token_ids", "finish_reason")
        | _fields(output, "mode", "coupling", "exactness")
        | {"ranks": ranks, "seed": first.seed}
        | _fields(output, "prompt_tokens", "cached_tokens", "reread", "completion_tokens")
        | _fields(output, "prefill_seconds", "decode_seconds")
        | {"tokens_per_second": output.tokens_per_second, "tiers": _tiers(first), "plans": first.plans}
        | {"kv": asdict(output.kv), "kv_dtype": output.kv_dtype}
    )
    if params.n > 1:
        whole["choices"] = [_choice(completion) for completion in output.outputs]
    if first.logprobs is not None:
        whole["logprobs"] = _logprobs(first.logprobs)
    if output.prompt_logprobs is not None:
        whole["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
    return whole


def _choice(completion: CompletionOutput) -> dict[str, Any]:
    choice = _fields(completion, "index", "text", "token_ids", "finish_reason", "seed") | {"tiers": _tiers(completion)}
    return choice if completion.logprobs is None else choice | {"logprobs": _logprobs(completion.logprobs)}


def _tiers(completion: CompletionOutput) -> list[dict[str, Any]]:
    return [_fields(tier, "name", "proposed", "accepted", "passes", "seconds") for tier in completion.tiers]


def _fields(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _logprobs(tokens: Iterable[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    return [token and json_value(token.chosen) | {"top": json_value(token.top)} for token in tokens]
