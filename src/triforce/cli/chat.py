"""`triforce chat`: questions and answers, about a document if one is given. Ends with the input (Ctrl-D)."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from triforce.cli import together
from triforce.cli.common import (
    Painter,
    Prefill,
    decode_text,
    legend,
    load,
    passes_per_token,
    read_text,
    sampling,
    show,
)
from triforce.errors import ModelError, RequestError
from triforce.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from triforce.checkpoint.tokenizer import Tokenizer
    from triforce.llm import LLM
    from triforce.ranks import Ranks
    from triforce.session import Session

Message = dict[str, str]


def run(options: Namespace) -> int:
    """In one process, or in several that share the model."""
    return together.run(options, chat)


def chat(options: Namespace, ranks: Ranks) -> int:
    """One session: what the turns have in common stays in its KV cache. Rank 0 reads and prints."""
    asked: Any = None if ranks.rank else _asked(options)
    given, document = ranks.agree(asked)
    llm = load(options, ranks if ranks.count > 1 else None)
    params = llm.sampling_params(**given)
    tokenizer = _chat_tokenizer(llm)
    from triforce.session import Session

    session = Session(llm)
    if ranks.rank:
        return _follow(session, params)
    messages: list[Message] = []
    for question in _questions():
        messages.append({"role": "user", "content": question if messages else document + question})
        ids = ranks.agree(tokenizer.chat(messages))
        output = show(session.ask(ids, params, Prefill()), Painter(tokenizer, ids) if options.color else None)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        _report(output, options.color)
    ranks.agree(None)
    return 0


def _asked(options: Namespace) -> tuple[dict[str, Any], str]:
    """How to sample, and the document to talk about. Raises RequestError."""
    given = sampling(options)
    if given.get("n", 1) != 1:
        raise RequestError("chat gives one answer at a time; leave out --n")
    return given, read_text(options.file) + "\n\n" if options.file else ""


def _follow(session: Session, params: SamplingParams) -> int:
    """What the ranks do that are not the first: the same turns."""
    unheard: list[int] | None = None
    while ids := session.llm.ranks.agree(unheard):
        deque(session.ask(ids, params), maxlen=0)
    return 0


def _chat_tokenizer(llm: LLM) -> Tokenizer:
    """The model's tokenizer, if it can lay out a conversation: better said now than after the first question."""
    if llm.tokenizer is None:
        raise ModelError("this model has no tokenizer; chat needs one with a chat template")
    llm.tokenizer.chat([{"role": "user", "content": "?"}])
    return llm.tokenizer


def _questions() -> Iterator[str]:
    """Lines of stdin that say something."""
    asked = sys.stdin.isatty()
    while True:
        if asked:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            return
        if question := decode_text(line, "stdin").strip():
            yield question


def _report(output: RequestOutput, color: bool) -> None:
    line = (
        f"[prompt {output.prompt_tokens:,} tokens in {output.prefill_seconds:.2f} s; {output.completion_tokens:,} new, "
        f"{output.tokens_per_second:.1f} tokens/s, {passes_per_token(output):.2f} full passes per token]"
    )
    print(f"{line} {legend(output.outputs[0].tiers)}" if color else line, file=sys.stderr)
