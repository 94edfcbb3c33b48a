"""`triforce generate`: continues a text."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict
from time import perf_counter
from typing import Any

from triforce.cli import tensor_parallel
from triforce.cli.answer_output import Painter, chat_sampling, cut_grammar_note, legend, report, show, split
from triforce.cli.asked_prompt import resolve_prompt
from triforce.cli.engine_arguments import load, sampling
from triforce.cli.parser import CANNOT_CHAT, CHAT_ADVICE
from triforce.cli.progress import Prefill, Seconds
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
    """Generate a text; rank 0 reads and prints.

    Raises RequestError, for the prompt and parameters before a model is loaded.
    """
    checked_inputs: Any = None if ranks.rank else _checked(options)
    sampling_values, options.model, prompt = ranks.broadcast(checked_inputs)
    template_messages = [{"role": "user", "content": "?"}] if options.chat else None
    llm = load(options, ranks if ranks.count > 1 else None, template_messages)
    start_seconds = perf_counter() - options.began
    if options.chat and not (llm.tokenizer and llm.tokenizer.chats):
        raise RequestError("this model has no chat template; leave out --chat, or name one by --chat-template")
    params = llm.sampling_params(chat=options.chat, **sampling_values)
    if options.chat and not (ranks.rank or options.quiet) and sys.stderr.isatty():
        print(f"sampling: {chat_sampling(llm.sampling_defaults, sampling_values)}", file=sys.stderr)
    with Seconds("tokenizing the text", options.quiet or ranks.rank > 0):
        ids = llm.encode_chat([{"role": "user", "content": prompt}]) if options.chat else llm.encode(prompt)
    if ranks.rank:
        llm.generate(ids, params)
        return 0
    cache_files = {"save_cache": options.save_cache, "load_cache": options.load_cache}
    progress = Prefill(options.quiet)
    output: RequestOutput | None
    if options.json or params.n > 1:
        with progress:
            (output,) = llm.generate(ids, params, **cache_files, on_prefill=progress)
    else:
        chunks = llm.stream(ids, params, **cache_files, on_prefill=progress)
        _, output = show(chunks, Painter(llm.tokenizer, ids) if options.color else None, progress)
    assert output is not None, "a stream ends with the whole answer"
    if options.json:
        print(json.dumps(as_json(output, params, ranks.count), ensure_ascii=False, allow_nan=False))
    elif params.n > 1:  # one after the other and uncoloured: streamed, the texts would mix
        for completion in output.outputs:
            print(f"[{completion.index + 1} of {params.n}]\n{completion.text}")
    if cut_note := cut_grammar_note(output, params, llm.grammars):
        print(cut_note, file=sys.stderr)
    if options.quiet or options.json:
        return 0
    if options.color:
        print(legend(output.outputs[0].tiers), file=sys.stderr)
    print(split(start_seconds, llm.load_seconds, output), report(output), sep="\n", file=sys.stderr)
    if llm.tokenizer and llm.tokenizer.chats and not options.chat:
        print("This model has a chat template: with --chat the PROMPT is sent as a chat message.", file=sys.stderr)
    return 0


def _checked(options: Namespace) -> tuple[dict[str, Any], str | None, str]:
    """Return sampling parameters, the model and the prompt. Raises RequestError, also for options without effect."""
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(options, name) is not None and not options.json:
            raise RequestError(f"--{name.replace('_', '-')} is printed only with --json; add --json, or leave it out")
    sampling_values = sampling(options)
    asked_prompt = resolve_prompt(options)
    if options.chat and asked_prompt.model is None:
        raise RequestError(f"{CANNOT_CHAT}; leave out --chat, or {CHAT_ADVICE}")
    require_writable(options.save_cache, "--save-cache")
    asked_prompt.print_remarks(options)
    return sampling_values, asked_prompt.model, asked_prompt.prompt


def as_json(output: RequestOutput, params: SamplingParams, ranks: int = 1) -> dict[str, Any]:
    """Return the object that --json prints; its text, ids, seed and tiers are those of the first continuation.

    ranks: number of processes that shared the model.
    """
    first_output = output.outputs[0]
    json_object = (
        _fields(first_output, "text", "token_ids", "finish_reason")
        | _fields(output, "mode", "coupling", "exactness")
        | {"ranks": ranks, "seed": first_output.seed}
        | _fields(output, "prompt_tokens", "cached_tokens", "reread", "completion_tokens")
        | _fields(output, "prefill_seconds", "decode_seconds")
        | {"tokens_per_second": output.tokens_per_second, "tiers": _tiers(first_output), "plans": first_output.plans}
        | {"kv": asdict(output.kv), "kv_dtype": output.kv_dtype, "weight_inputs": output.weight_inputs}
    )
    if params.n > 1:
        json_object["choices"] = [_choice(completion) for completion in output.outputs]
    if first_output.logprobs is not None:
        json_object["logprobs"] = _logprobs(first_output.logprobs)
    if output.prompt_logprobs is not None:
        json_object["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
    return json_object


def _choice(completion: CompletionOutput) -> dict[str, Any]:
    choice = _fields(completion, "index", "text", "token_ids", "finish_reason", "seed") | {"tiers": _tiers(completion)}
    return choice if completion.logprobs is None else choice | {"logprobs": _logprobs(completion.logprobs)}


def _tiers(completion: CompletionOutput) -> list[dict[str, Any]]:
    return [_fields(tier, "name", "proposed", "accepted", "passes", "seconds") for tier in completion.tiers]


def _fields(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _logprobs(tokens: Iterable[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    return [token and json_value(token.chosen) | {"top": json_value(token.top)} for token in tokens]
