"""Answers on a terminal: streams, colours by tier, and statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from triforce.cli.counts import counted
from triforce.cli.progress import Prefill
from triforce.interface.explain import TierStats
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import CHAT_DEFAULTS, SamplingParams, chat_defaults

if TYPE_CHECKING:
    from triforce.checkpoint.model_files import ModelFiles
    from triforce.checkpoint.tokenizer import Tokenizer
    from triforce.engine.engine import OutputChunk
    from triforce.structured_output.compiler import GrammarCompiler

PLANS = 4  # those of mode auto that are listed, the most used ones

COLORS = {"ngram": 35, "draft": 32, "streaming": 33, "retrieval": 36, "full": 31}  # by tier; ANSI foregrounds


class Painter:
    """Colours each character by the tier that proposed its token. Pieces of text hold the tokens of a whole pass."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> None:
        self._stream = tokenizer.stream(after=prompt) if tokenizer else None
        self._origins: list[str] = []  # of the characters to come: text may be held back, never reordered

    def __call__(self, piece: OutputChunk) -> str:
        for token, origin in zip(piece.token_ids, piece.origins, strict=True):
            self._origins += [origin] * len(self._stream.step(token) if self._stream else "")
        text = piece.text
        origins = self._origins[: len(text)]
        self._origins = self._origins[len(text) :]
        origins += piece.origins[-1:] * (len(text) - len(origins))  # the flush at the end belongs to the last token
        runs = groupby(zip(text, origins, strict=True), key=lambda pair: pair[1])
        return "".join(paint("".join(character for character, _ in run), origin) for origin, run in runs)


def paint(text: str, tier: str) -> str:
    """`text` in the colour of a tier."""
    return f"\033[{COLORS.get(tier, 0)}m{text}\033[0m"


def show(
    pieces: Iterable[OutputChunk | RequestOutput], painter: Painter | None, progress: Prefill
) -> tuple[str, RequestOutput | None]:
    """Print a stream as it comes, in the place of `progress`; return its text, and the answer if it came to its end."""
    text = ""
    output = None
    with progress:
        for piece in pieces:
            progress.close()
            if isinstance(piece, RequestOutput):
                output = piece
            else:
                text += piece.text
                print(painter(piece) if painter else piece.text, end="", flush=True)
    print(flush=True)
    return text, output


def legend(tiers: Sequence[TierStats]) -> str:
    """The tiers' names, each in its colour."""
    return "proposed by: " + " ".join(paint(tier.name, tier.name) for tier in tiers)


def passes_per_token(output: RequestOutput) -> float:
    """Passes of the full tier for each new token; 1 in plain decoding."""
    return output.tiers[-1].passes / max(output.completion_tokens, 1)


def read_before(output: RequestOutput) -> str:
    """Return how much of a prompt was read before, to stand behind its tokens."""
    return f", {output.cached_tokens:,} of them read before," if output.cached_tokens else ""


def cut_form(output: RequestOutput, params: SamplingParams, grammars: GrammarCompiler) -> str:
    """Return what is said of a text that ends before it is all that its grammar describes; nothing of other texts."""
    cut = [completion for completion in output.outputs if completion.finish_reason == "length"]
    if not (cut and params.grammar):
        return ""
    compiled = grammars.compile(params.grammar)
    if not (cut := [completion for completion in cut if not compiled.accepts(completion.token_ids)]):
        return ""
    option = "--regex" if params.grammar.kind == "regex" else "--choice"
    what = "JSON" if params.grammar.holds_json else f"text of {option}"
    if all(len(completion.token_ids) < params.max_tokens for completion in cut):
        return f"the {what} is cut, as the context is full; give a shorter prompt or a larger --context"
    return f"the {what} is cut at --max-tokens {params.max_tokens}; give more"


def report(output: RequestOutput) -> str:
    """The statistics of one request, for people."""
    ends = ", ".join(completion.finish_reason for completion in output.outputs)
    lines = [
        f"prompt {counted(output.prompt_tokens, 'token')}{read_before(output)} in {output.prefill_seconds:.2f} s; "
        f"new {counted(output.completion_tokens, 'token')} in {output.decode_seconds:.2f} s: "
        f"{output.tokens_per_second:.1f} tokens/s",
        f"mode {output.mode}, coupling {output.coupling}, exactness {output.exactness}, KV {output.kv_dtype}, "
        f"seed {output.outputs[0].seed}, ended by {ends}",
        f"{'tier':<10} {'proposed':>9} {'accepted':>9} {'':>6} {'passes':>7} {'seconds':>8}",
    ]
    for tier in output.tiers:
        share = "" if tier.acceptance is None else f"{tier.acceptance:.0%}"
        lines.append(
            f"{tier.name:<10} {tier.proposed:>9,} {tier.accepted:>9,} {share:>6} {tier.passes:>7,} {tier.seconds:>8.2f}"
        )
    lines.append(f"full passes per new token: {passes_per_token(output):.2f}")
    if output.reread:
        lines.append(f"the prompt was read: {output.reread}")
    if output.mode == "auto" and output.coupling != "seeded":
        lines.append(f"in mode auto the text of a seed depends on the clock under {output.coupling}: its law does not")
    plans = sorted(output.outputs[0].plans.items(), key=lambda plan: -plan[1])[:PLANS]
    lines += [f"plan       {proposals:>9,} proposals of {plan}" for plan, proposals in plans]
    return "\n".join(lines)


NEUTRAL = SamplingParams()


def defaults(files: ModelFiles) -> str:
    """Return the defaults that a model's files name, or those in their place."""
    named = files.sampling_defaults()
    usual = ""
    if chat_defaults(named) != named:
        usual = f"; in chats {_listed(chat_defaults(named))}, the usual values"
    if named:
        return f"{_listed(named)} by default ({files.sampling_source}){usual}"
    return f"temperature {NEUTRAL.temperature:g} by default{usual}"


def of_chats(named: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> str:
    """Return how chats are sampled, given what a model's files name and what options do."""
    params = SamplingParams(**(chat_defaults(named) | dict(given or {})))
    if not params.temperature:
        return "greedy"
    values = {name: getattr(params, name) for name in (*CHAT_DEFAULTS, "repetition_penalty")}
    told = {name: x for name, x in values.items() if name == "temperature" or x != getattr(NEUTRAL, name)}
    own = named.keys() & CHAT_DEFAULTS.keys()
    source = "those of the model's files" if own else "the usual ones, as the model's files name none"
    return f"{_listed(told)}; defaults are {source}"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
