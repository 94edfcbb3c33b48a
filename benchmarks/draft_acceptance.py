"""What a target keeps of a draft that reads its hidden states: by kind of text, temperature and context.

    python -m benchmarks.draft_acceptance smollm2 --texts FOLDER --json benchmarks/results/draft_acceptance.json

Give texts that the draft was not trained on. At each context the same tokens are drafted: the last ones of a window.
The context is the part of the window that the target sees. A model with a chat template is also asked about windows, in
words that no training has, and its answers are drafted.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import study
from triforce.backends.torch.tensors import as_tensor
from triforce.cli.bench import parts, setup
from triforce.cli.bench.setup import machine, show
from triforce.cli.options import described, draft, json_file, model, placement, quiet, several
from triforce.eagle.head_files import read_eagle_head
from triforce.eagle.torch_passes import EagleHeadLayer, eagle_head_tensors
from triforce.errors import RequestError
from triforce.eval import Text
from triforce.eval.context import spread_windows
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.tables import Table
from triforce.training.distillation import SAMPLED_TEMPERATURE, OutputHead, Subject, shares_at_length
from triforce.training.initial_weights import last_norm
from triforce.training.trainer import torch_threads
from triforce.training.training_card import acceptance_table

Row = dict[str, Any]
QUESTIONS = (
    "Who or what is this passage about, and what happens?",
    "Give this passage a title, and explain your choice.",
    "List five facts that are stated above.",
    "Rewrite the last paragraph in your own words.",
)
ASKED = 64
"""Tokens of a chat that are not of its window, at most."""


def add_arguments(parser: ArgumentParser) -> None:
    model(parser)
    draft(parser)
    parts.texts(parser)
    add = parser.add_argument
    add("--contexts", type=several(int), default=[1024, 7168], metavar="N,...", help="tokens that the target sees")
    add("--windows", type=int, default=2, metavar="N", help=described("windows of each text"))
    add("--tokens", type=int, default=256, metavar="N", help=described("last tokens of a window, which are drafted"))
    add("--steps", type=int, default=4, metavar="N", help=described("draft tokens in a row"))
    quiet(parser)
    placement(parser, context=False)
    json_file(parser)


def measure(options: Namespace) -> None:
    """Print a line for each row as it is measured, and a table at the end. Raises TriforceError."""
    if min(*options.contexts, options.windows, options.steps) < 1:
        raise RequestError("--contexts, --windows and --steps must be at least 1")
    if min(options.contexts) <= options.tokens + ASKED or options.tokens < options.steps:
        raise RequestError(f"--tokens must be at least --steps, and with {ASKED} more below all --contexts")
    threads = torch.get_num_threads()  # before native kernels claim all but one
    llm, rows = setup.load(options), list[Row]()
    if max(options.contexts) > llm.target.config.context:
        raise RequestError(f"--contexts: the model has {llm.target.config.context:,} positions")
    subject, texts = of_draft(llm), setup.sources(llm, options.texts).texts
    print(machine())
    with torch_threads(threads):
        for row in measured(llm, subject, windows(texts, max(options.contexts), options.windows), options):
            rows.append(row)
            print(line(row), flush=True)
            study.write(options, {"rows": rows})
    show(tables(rows))


def of_draft(llm: LLM) -> Subject:
    """Return the draft of an engine as trainings look at it. Raises RequestError for one that reads no states."""
    if llm.eagle_head is None:
        raise RequestError("this draft reads no hidden states; name one that does with --draft")
    target = llm.target
    file = read_eagle_head(llm.eagle_head.path, target.config, "", finetune=True)
    rows_MC = as_tensor(target.decoder.head_rows(file.weights.tokens_M))
    weights = eagle_head_tensors(file.weights, "float32", "cpu")
    head = OutputHead(last_norm(target), target.config.norm_eps, rows_MC, target.config.architecture.logit_cap)
    return Subject(EagleHeadLayer(file.config, weights), head, weights.tokens_M)


def windows(texts: Sequence[Text], length: int, most: int) -> list[Text]:
    """Return windows of `length` tokens, spread over each text. Raises RequestError where there are none."""
    found = [window for text in texts for window in spread_windows(text, length, most) if len(window.ids_N) == length]
    if not found:
        raise RequestError(f"no text has {length:,} tokens; give --texts some that do, or --contexts that are shorter")
    return found


def measured(llm: LLM, subject: Subject, found: Sequence[Text], options: Namespace) -> Iterator[Row]:
    """Yield a row for each kind, context and temperature."""
    for context in options.contexts:
        for kind in dict.fromkeys(window.kind for window in found):
            ids_BL = torch.stack([window.ids_N[-context:] for window in found if window.kind == kind])
            yield from of_texts(llm, subject, kind, ids_BL, options)
        if llm.tokenizer and llm.tokenizer.chats:
            for temperature in (0.0, SAMPLED_TEMPERATURE):
                yield of_answers(llm, subject, [window.ids_N for window in found], context, temperature, options)


def of_texts(llm: LLM, subject: Subject, kind: str, ids_BL: Tensor, options: Namespace) -> Iterator[Row]:
    for temperature, kept in shares(llm, subject, [ids_BL], options).items():
        yield {"kind": kind, "context": ids_BL.shape[1], "temperature": temperature, "kept": kept}


def of_answers(
    llm: LLM, subject: Subject, windows_BN: Sequence[Tensor], context: int, temperature: float, options: Namespace
) -> Row:
    """Ask about the end of each window; draft what the target answers, as far as it does."""
    assert llm.tokenizer
    whole = []
    for b, ids_N in enumerate(windows_BN):
        excerpt = llm.tokenizer.decode(ids_N[-(context - options.tokens - ASKED) :].tolist())
        question = f"{excerpt}\n\n{QUESTIONS[b % len(QUESTIONS)]}"
        asked = llm.tokenizer.chat([{"role": "user", "content": question}])
        params = SamplingParams(temperature=temperature, seed=b, max_tokens=options.tokens)
        (output,) = llm.generate([asked], params, mode="ar")
        new = list(output.outputs[0].token_ids)
        if len(new) >= options.steps:
            whole.append((torch.tensor([asked + new]), len(new)))
    if not whole:
        raise RequestError(f"no answer has {options.steps} tokens; give --windows more, or --steps less")
    name = f"{temperature:g}"
    kept = shares(llm, subject, [ids_1L for ids_1L, _ in whole], options, [count for _, count in whole])[name]
    return {"kind": "answers", "context": context, "temperature": name, "kept": kept}


def shares(
    llm: LLM, subject: Subject, texts: Sequence[Tensor], options: Namespace, tails: Sequence[int] = ()
) -> dict[str, list[float]]:
    """Return the accepted shares by temperature, averaged over texts; `tails` tokens of each text are drafted."""
    layers, decoder = subject.layer.config.state_layers, llm.target.decoder
    each = [
        shares_at_length(decoder, layers, subject, ids_BL, 512, options.steps, tail)
        for ids_BL, tail in zip(texts, tails or [options.tokens] * len(texts), strict=True)
    ]
    return {name: torch.tensor([found[name] for found in each]).mean(0).tolist() for name in each[0]}


def line(row: Row) -> str:
    """Return a row as one line."""
    return f"{row['kind']:8} {row['context']:6} T = {row['temperature']:4} {' '.join(f'{x:.3f}' for x in row['kept'])}"


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return all rows as a table."""
    note = "None of the texts was trained on. Answers are the target's own, to questions that no training asks."
    return [acceptance_table("Acceptance of a draft", note, rows)]


main = study.command("draft_acceptance", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())
