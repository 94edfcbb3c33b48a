"""`triforce demo`: a small real model answers questions about a part of a book, by plain decoding and in mode auto.

If the model cannot be fetched, the shipped pair continues the book, by plain decoding and in mode triforce. Exit code 1
unless the texts are identical.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from triforce.checkpoint.model_sources import SMOLLM2, UnavailableModel, find
from triforce.cli.answer_output import Painter, legend, passes_per_token, show
from triforce.cli.chat.conversation import Conversation
from triforce.cli.machine_rates import require_balances
from triforce.cli.progress import Prefill, report_loading
from triforce.cli.text_files import TITLE, sample_book
from triforce.errors import RequestError
from triforce.interface.outputs import RequestOutput
from triforce.interface.quantities import counted
from triforce.interface.repeated_grams import LOOP_SHARE, repeated_share
from triforce.interface.sampling_params import RANDOM_SEED, SamplingParams, random_seed

if TYPE_CHECKING:
    from triforce.checkpoint.tokenizer import Tokenizer
    from triforce.llm import LLM

BEGIN, END = 'CUTTING FROM "THE DAILYGRAPH,"', "\nMina Murray's Journal.\n"
"""First words of the excerpt that the questions are about, and the words that follow the excerpt."""
QUESTION = "What was the name of the schooner that came into the harbour?"
TASK = "Continue the log of the ship with one more day."
PROMPT_TOKENS = 16_384
TEMPERATURE = 0.8
SHOWN_TOKENS = 48  # tokens of the prompt that are shown


@dataclass(frozen=True)
class Task:
    """One comparison: a prompt, and the mode whose text must equal that of plain decoding."""

    text: str
    prompt: list[int]
    mode: str


def run(options: Namespace) -> int:
    """Make each text once by plain decoding and once with tiers; the long prompt is read once."""
    began = perf_counter()
    seed = random_seed() if options.seed == RANDOM_SEED else options.seed  # one for both texts
    common = {"seed": seed, "max_tokens": options.max_tokens}
    params = [SamplingParams(temperature=temperature, **common) for temperature in (0, TEMPERATURE)]
    model = _real_model() if options.prompt_tokens is None else None
    report_loading(model and SMOLLM2.name)
    require_balances()
    from triforce.llm import LLM

    placement = {name: getattr(options, name) for name in ("device", "dtype", "kv_dtype", "weight_inputs")}
    llm = LLM(model, **placement)
    assert llm.tokenizer is not None, "both models have one"
    tasks = (
        _questions(llm.tokenizer)
        if model
        else _continuations(llm.tokenizer, llm.target.config.context, options.prompt_tokens)
    )
    task_params = [replace(sampling, ignore_eos=model is None) for sampling in params]  # a book goes on, an answer ends
    verdicts = [_compare(llm, task, sampling) for task, sampling in zip(tasks, task_params, strict=True)]
    print(f"\n{llm.break_even().sentence}\nIn all {perf_counter() - began:.1f} s.")
    return 0 if all(verdicts) else 1


def book_part() -> str:
    """Return the part of the book that is asked about: a newspaper's report of a storm, and the log of a ship."""
    book = sample_book()
    begin = book.index(BEGIN)
    return book[begin : book.index(END, begin)]


def _real_model() -> str | None:
    """Return the file of the real model; None, with a message, if it cannot be fetched. Raises ModelError."""
    try:
        return str(find(SMOLLM2))
    except UnavailableModel as error:
        print(f"{error}.\nThe pair that comes with triforce continues a text instead.", file=sys.stderr)
        return None


def _questions(tokenizer: Tokenizer) -> list[Task]:
    """Return a question with one right answer, and a task that takes a longer text."""
    document = Conversation(document=book_part())
    prompts = [tokenizer.chat(document.messages(text)) for text in (QUESTION, TASK)]
    print(f"{TITLE}, chapter 7, a storm and the log of a ship: {len(prompts[0]):,} tokens with the question.")
    print(f"{SMOLLM2.name} is asked about it. A model of 135M parameters is often wrong.")
    return [Task(*question_prompt, "auto") for question_prompt in zip((QUESTION, TASK), prompts, strict=True)]


def _continuations(tokenizer: Tokenizer, context: int, tokens: int | None) -> list[Task]:
    """Return two tasks: to continue the book's first `tokens` tokens.

    Raises RequestError if the book or the context has fewer tokens.
    """
    tokens = PROMPT_TOKENS if tokens is None else tokens
    ids = tokenizer.encode(sample_book())
    token_limit = min(len(ids), context - 1)  # with room for a new token
    if not 1 < tokens <= token_limit:
        limits = f"the book has {len(ids):,} tokens, and the context {context:,}"
        raise RequestError(f"--prompt-tokens {tokens}: {limits}; give 2 to {token_limit}")
    print(f"{TITLE}: the first {tokens:,} tokens. They end:\n\n... {tokenizer.decode(ids[:tokens][-SHOWN_TOKENS:])}")
    return [Task("Continue the book.", ids[:tokens], "triforce")] * 2


def _compare(llm: LLM, task: Task, params: SamplingParams) -> bool:
    sampling_note = f"temperature {params.temperature}, seed {params.seed}" if params.temperature else "greedy"
    print(f"\n== {task.text} ({sampling_note}) ==")
    plain_output, task_output = (_continue(llm, task.prompt, params, mode) for mode in ("ar", task.mode))
    identical = (
        plain_output.outputs[0].token_ids == task_output.outputs[0].token_ids
        and plain_output.outputs[0].text == task_output.outputs[0].text
    )
    print(f"\ntexts       {'identical' if identical else 'NOT IDENTICAL'}")
    print(f"{'plain':<11} {_speed_text(plain_output)}")
    speedup_note = f"{plain_output.decode_seconds / task_output.decode_seconds:.2f} times as fast"
    print(f"{task.mode:<11} {_speed_text(task_output)}, {speedup_note}{_repetition_note(plain_output, task_output)}")
    drafting_tiers = [tier for tier in task_output.outputs[0].tiers[:-1] if tier.proposed]
    shares = [f"{tier.name} {tier.acceptance or 0:.0%} of {tier.proposed:,}" for tier in drafting_tiers]
    print(f"accepted    {', '.join(shares) or 'nothing was drafted'}")
    print(
        f"full passes {passes_per_token(task_output):.2f} per new token "
        f"(plain decoding: {passes_per_token(plain_output):.2f})"
    )
    return identical


def _repetition_note(*outputs: RequestOutput) -> str:
    """Return a remark to follow the ratio of speeds: on texts that repeat themselves the ratio says little."""
    share = max(repeated_share(output.outputs[0].token_ids) for output in outputs)
    return f": the text repeats itself ({share:.0%} of its 8-grams), so this ratio says little" * (share >= LOOP_SHARE)


def _continue(llm: LLM, prompt: list[int], params: SamplingParams, mode: str) -> RequestOutput:
    """Stream one text to stdout. The KV of the earlier text's prompt is reused."""
    color = sys.stdout.isatty() and mode != "ar"
    print(f"\n[{mode}] ", end="", flush=True)
    progress = Prefill()
    chunks = llm.stream(prompt, params, mode=mode, on_prefill=progress)
    _, output = show(chunks, Painter(llm.tokenizer, prompt) if color else None, progress)
    assert output is not None, "a stream ends with the whole answer"
    if color:
        print(legend(output.outputs[0].tiers))
    if not output.cached_tokens:
        rate = output.prompt_tokens / output.prefill_seconds
        print(f"(the prompt was read in {output.prefill_seconds:.1f} s: {rate:,.0f} tokens/s)")
    return output


def _speed_text(output: RequestOutput) -> str:
    new_tokens = counted(output.completion_tokens, "token")
    return f"{new_tokens} in {output.decode_seconds:.2f} s: {output.tokens_per_second:.1f} tokens/s"
