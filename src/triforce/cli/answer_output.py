"""Answers on a terminal: streamed text, colours by tier, and statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from triforce.cli.progress import Prefill
from triforce.interface.explain import TierStats, late_reading
from triforce.interface.outputs import RequestOutput
from triforce.interface.quantities import counted
from triforce.interface.sampling_params import CHAT_DEFAULTS, SamplingParams, chat_defaults

if TYPE_CHECKING:
    from triforce.checkpoint.model_files import ModelFiles
    from triforce.checkpoint.tokenizer import Tokenizer
    from triforce.engine.engine import OutputChunk
    from triforce.structured_output.compiler import GrammarCompiler

LISTED_PLANS = 4  # plans of mode auto that are listed, the most used ones

COLORS = {"ngram": 35, "draft": 32, "streaming": 33, "retrieval": 36, "full": 31}  # by tier; ANSI foregrounds


class Painter:
    """Colours each character by the tier that proposed its token. A chunk of text holds the tokens of a whole pass."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> None:
        self._stream = tokenizer.stream(prefix_ids=prompt) if tokenizer else None
        self._origins: list[str] = []  # tiers of the characters to come: text may be held back, never reordered

    def __call__(self, chunk: OutputChunk) -> str:
        for token, origin in zip(chunk.token_ids, chunk.origins, strict=True):
            self._origins += [origin] * len(self._stream.step(token) if self._stream else "")
        text = chunk.text
        origins = self._origins[: len(text)]
        self._origins = self._origins[len(text) :]
        origins += chunk.origins[-1:] * (len(text) - len(origins))  # the flush at the end belongs to the last token
        runs = groupby(zip(text, origins, strict=True), key=lambda pair: pair[1])
        return "".join(paint("".join(character for character, _ in run), origin) for origin, run in runs)


def paint(text: str, tier: str) -> str:
    """Return `text` in the colour of a tier."""
    return f"\033[{COLORS.get(tier, 0)}m{text}\033[0m"


def show(
    chunks: Iterable[OutputChunk | RequestOutput], painter: Painter | None, progress: Prefill
) -> tuple[str, RequestOutput | None]:
    """Print a stream as it comes, in place of the bar `progress`.

    Returns the text, and the output; None in its place if the stream was stopped before its end.
    """
    text = ""
    output = None
    with progress:
        for chunk in chunks:
            progress.close()
            if isinstance(chunk, RequestOutput):
                output = chunk
            else:
                text += chunk.text
                print(painter(chunk) if painter else chunk.text, end="", flush=True)
    print(flush=True)
    return text, output


def legend(tiers: Sequence[TierStats]) -> str:
    """Return the tiers' names, each in its colour."""
    return "proposed by: " + " ".join(paint(tier.name, tier.name) for tier in tiers)


def passes_per_token(output: RequestOutput) -> float:
    """Return passes of the full tier per new token; 1 in plain decoding."""
    return output.tiers[-1].passes / max(output.completion_tokens, 1)


def cached_note(output: RequestOutput) -> str:
    """Return a phrase with the number of cached prompt tokens, to follow the prompt's token count; empty if none."""
    return f", {output.cached_tokens:,} of them cached," if output.cached_tokens else ""


def cut_grammar_note(output: RequestOutput, params: SamplingParams, grammars: GrammarCompiler) -> str:
    """Return a remark on texts that end before their grammar accepts them; empty if there is none."""
    cut_completions = [completion for completion in output.outputs if completion.finish_reason == "length"]
    if not (cut_completions and params.grammar):
        return ""
    compiled = grammars.compile(params.grammar)
    if not (
        cut_completions := [completion for completion in cut_completions if not compiled.accepts(completion.token_ids)]
    ):
        return ""
    option = "--regex" if params.grammar.kind == "regex" else "--choice"
    form = "JSON" if params.grammar.holds_json else f"text of {option}"
    if all(len(completion.token_ids) < params.max_tokens for completion in cut_completions):
        return f"the {form} is cut, as the context is full; give a shorter prompt or a larger --context"
    return f"the {form} is cut at --max-tokens {params.max_tokens}; give more"


def split(start_seconds: float, load_seconds: float, output: RequestOutput) -> str:
    """Return as text where the seconds of a command went. start_seconds: from its start until the model was loaded."""
    parts = {"imports and engine": start_seconds - load_seconds, "weights": load_seconds}
    parts |= {"prompt": output.prefill_seconds, "tokens": output.decode_seconds}
    return "seconds: " + ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())


def reading_note(seconds: float) -> str:
    """Return a remark on the seconds of decoding in which a draft read the text."""
    return f"of the decoding, the draft read the text for {seconds:.2f} s"


def report(output: RequestOutput) -> str:
    """Return the statistics of one request as text for people."""
    ends = ", ".join(completion.finish_reason for completion in output.outputs)
    lines = [
        f"prompt {counted(output.prompt_tokens, 'token')}{cached_note(output)} in {output.prefill_seconds:.2f} s; "
        f"new {counted(output.completion_tokens, 'token')} in {output.decode_seconds:.2f} s: "
        f"{output.tokens_per_second:.1f} tokens/s",
        f"mode {output.mode}, coupling {output.coupling}, exactness {output.exactness}, KV {output.kv_dtype}, "
        + "inputs int8, " * (output.weight_inputs == "int8")
        + f"seed {output.outputs[0].seed}, ended by {ends}",
        f"{'tier':<10} {'proposed':>9} {'accepted':>9} {'':>6} {'passes':>7} {'seconds':>8}",
    ]
    for tier in output.tiers:
        share = "" if tier.acceptance is None else f"{tier.acceptance:.0%}"
        lines.append(
            f"{tier.name:<10} {tier.proposed:>9,} {tier.accepted:>9,} {share:>6} {tier.passes:>7,} {tier.seconds:>8.2f}"
        )
    if seconds := late_reading(output.mode, output.tiers):
        lines.append(reading_note(seconds))
    lines.append(f"full passes per new token: {passes_per_token(output):.2f}")
    if output.reread:
        lines.append(f"why the prompt was read: {output.reread}")
    if output.mode == "auto" and output.coupling != "seeded":
        lines.append(
            f"in mode auto under {output.coupling} the text of a seed depends on timing; its distribution does not"
        )
    plans = sorted(output.outputs[0].plans.items(), key=lambda plan: -plan[1])[:LISTED_PLANS]
    lines += [f"plan       {proposals:>9,} proposals of {plan}" for plan, proposals in plans]
    return "\n".join(lines)


NEUTRAL_PARAMS = SamplingParams()


def defaults(files: ModelFiles) -> str:
    """Return the sampling defaults that a model's files name, or those of triforce, as text."""
    file_defaults = files.sampling_defaults()
    chat_note = ""
    if chat_defaults(file_defaults) != file_defaults:
        chat_note = f"; in chats {_values_text(chat_defaults(file_defaults))}, the usual values"
    if file_defaults:
        return f"{_values_text(file_defaults)} by default ({files.sampling_source}){chat_note}"
    return f"temperature {NEUTRAL_PARAMS.temperature:g} by default{chat_note}"


def chat_sampling(file_defaults: Mapping[str, Any], option_values: Mapping[str, Any] | None = None) -> str:
    """Return as text how chats are sampled: defaults of the model's files, overridden by `option_values`."""
    params = SamplingParams(**(chat_defaults(file_defaults) | dict(option_values or {})))
    if not params.temperature:
        return "greedy"
    values = {name: getattr(params, name) for name in (*CHAT_DEFAULTS, "repetition_penalty")}
    shown_values = {
        name: value for name, value in values.items() if name == "temperature" or value != getattr(NEUTRAL_PARAMS, name)
    }
    file_chat_names = file_defaults.keys() & CHAT_DEFAULTS.keys()
    source = "those of the model's files" if file_chat_names else "the usual ones, as the model's files name none"
    return f"{_values_text(shown_values)}; defaults are {source}"


def _values_text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
