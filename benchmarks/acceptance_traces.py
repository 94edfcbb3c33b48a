"""Traces of acceptance, which tests replay through the planner (tests/planner/test_regret.py).

    python -m benchmarks.acceptance_traces TEXT.txt --context 8192 --temperatures 0.6 --workload books

A text is sampled under `seeded`, and then read again: each tier is asked for every token, with all before it right. As
tiers share their noise, that says what any plan would have had accepted. Bits are in `FACTS`; matches and hits are
those of n-grams. Selections are as old as in a text whose verifications are `BLOCK` tokens apart.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import study
from triforce import LLM, SamplingParams
from triforce.arrays import namespace
from triforce.bench.prompts import MAKERS, Sources, prompts
from triforce.cli.options import described
from triforce.cli.text_files import read_text
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import prefill_batch
from triforce.engine.tier_builder import MODES, unlink_tiers
from triforce.eval import Text
from triforce.eval.context import tokenizer_of
from triforce.kvcache import RetrievalView
from triforce.planner.cost_model import MAX_GAMMA
from triforce.speculation import Draft, Tier
from triforce.speculation.ngram import MIN_MATCH_ALONE, PROMPT_TAIL, NgramIndex

FILE = "tests/data/acceptance_traces.npz"
TOKENS = 1024  # of a trace
SKIPPED, LONGEST = 20_000, 80_000  # characters of a text: before a prompt, and beside one that has many pieces
BLOCK = 8  # tokens of a verification
FACTS = ("draft", "retrieval", "retrieval x0.5", "retrieval x2", "draft is retrieval")
"""Bits of a position: the tier's token is that of the text; and that of the retrieval tier, in the last one."""

LIVE = np.array([True])


@dataclass
class Reading:
    """A text that is read again: its tiers, and what each said."""

    batch: SequenceBatch
    text: list[int]

    def facts(self) -> np.ndarray:
        """(TOKENS,) of bits."""
        tiers = {tier.name: tier for tier in unlink_tiers(self.batch.top) if isinstance(tier, Tier)}
        view = tiers["retrieval"].cache
        facts = np.zeros(TOKENS, np.uint8)
        assert isinstance(view, RetrievalView)
        for start in range(0, TOKENS, BLOCK):
            true = self.text[start : start + BLOCK]
            picks = {}
            for name, times in (("retrieval x0.5", 0.5), ("retrieval x2", 2.0), ("retrieval", 1.0)):
                bits = int(self.batch.prefix.lengths_B[0] - 1).bit_length()
                view.budget_factors = {} if times == 1 else {bits: times}
                view.selections[0].pages = None
                picks[name] = self.picks(tiers["retrieval"], true)
            picks["draft"] = self.picks(tiers["draft"], true) if "draft" in tiers else [-1] * BLOCK
            assert self.picks(tiers["full"], true) == true, "the text is another one"
            for i in range(BLOCK):
                right = [picks[name][i] == true[i] for name in FACTS[:-1]]
                facts[start + i] = sum(
                    bit << n for n, bit in enumerate([*right, picks["draft"][i] == picks["retrieval"][i]])
                )
            longer = self.batch.prefix.append(drafted(true))
            for tier in tiers.values():
                if tier.name != "full":
                    tier.rewind(longer)
            tiers["full"].cache.pool.lengths_B += len(true)
            self.batch.prefix = longer
        return facts

    def picks(self, tier: Tier[Any], true: list[int]) -> list[int]:
        """The token of a tier at each place, with all before it right. Its cache is as before."""
        prefix = self.batch.prefix
        sampling = self.batch.sampling
        logits_BJV = tier.score(prefix, drafted(true), LIVE)
        nothing = Draft.empty(1, sampling.probs_size)
        picked_tokens = []
        for j in range(len(true)):
            longer = prefix.append(drafted(true[:j]))
            column = namespace(logits_BJV).asarray(logits_BJV[:, j : j + 1], copy=True)
            picked_tokens.append(int(sampling.verify(nothing, column, longer, LIVE, tier.level).tokens_BK[0, 0]))
        tier.rewind(prefix)
        return picked_tokens


def drafted(tokens: list[int]) -> Draft:
    """A proposal of these tokens."""
    tokens_BK = np.array([tokens], dtype=np.int64).reshape(1, -1)
    return Draft(tokens_BK, np.zeros((1, len(tokens), 0)), np.zeros_like(tokens_BK), np.array([len(tokens)]))


def ngrams(prompt: list[int], text: list[int]) -> np.ndarray:
    """Matches and hits (2, PROMPT_TAIL + TOKENS) at each place from `PROMPT_TAIL` before the prompt's end on."""
    ids = np.array(prompt + text)
    index = NgramIndex(MIN_MATCH_ALONE)
    match_counts = np.zeros((2, PROMPT_TAIL + TOKENS), np.uint8)
    for i in range(PROMPT_TAIL + TOKENS):
        place = len(prompt) - PROMPT_TAIL + i
        index.read(ids[:place])
        match, start = index.match(ids[:place])
        if match:
            wrong = np.resize(ids[start:place], MAX_GAMMA) != ids[place : place + MAX_GAMMA]
            match_counts[:, i] = match, int(wrong.argmax()) if wrong.any() else MAX_GAMMA
    return match_counts


def batch_of(llm: LLM, prompt: list[int], params: SamplingParams) -> SequenceBatch:
    """A batch of one sequence with all tiers, whose prompt has been read."""
    sequence = TokenSequence(prompt, params, params.seed or 0)
    batch = SequenceBatch(llm.models, MODES["auto"], llm.speculation, "seeded", [sequence])
    deque(prefill_batch(batch), maxlen=0)
    return batch


def record(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the facts and the n-grams of one text."""
    (output,) = llm.generate([prompt], params, mode="triforce" if llm.draft else "retrieval")
    text = output.outputs[0].token_ids
    batch = batch_of(llm, prompt, params)
    with torch.no_grad():
        return Reading(batch, text).facts(), ngrams(prompt, text)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("text", help="a UTF-8 file")
    parser.add_argument("--model", metavar="MODEL", help="of another model than the shipped pair, without a draft")
    parser.add_argument("--kind", default="prose", choices=("prose", "code"), help=described("what the text is"))
    parser.add_argument("--workload", choices=list(MAKERS), default="books", help=described("how prompts are made"))
    parser.add_argument("--context", type=int, default=8192, metavar="N", help=described("tokens of a prompt"))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6], metavar="X", help=described("of texts"))
    parser.add_argument(
        "--traces", default=FILE, metavar="FILE", help=described("where traces are added, by their names")
    )


def measure(options: Namespace) -> None:
    """Add a trace for each temperature to the file, and print the share of each fact. Raises TriforceError."""
    llm = LLM(options.model, None if options.model else "auto", retrieval_budget="auto", searched_layers="none")
    tokenizer = tokenizer_of(llm)
    ids = torch.tensor(tokenizer.encode(read_text(options.text)[SKIPPED : 9 * options.context + LONGEST]))
    stem = Path(options.text).stem[:8]
    model = Path(options.model).stem if options.model else "pair"
    (prompt,) = prompts(Sources(tokenizer, [Text(stem, options.kind, ids)]), options.workload, options.context, 1)
    for temperature in options.temperatures:
        params = SamplingParams(temperature, top_p=0.9, seed=7, max_tokens=TOKENS + MAX_GAMMA, ignore_eos=True)
        facts, match_counts = record(llm, prompt, params)
        name = f"{model} {options.workload} {options.context} {temperature:g} {stem}"
        add(Path(options.traces), name, facts, match_counts)
        shares = [f"{fact} {(facts >> n & 1).mean():.3f}" for n, fact in enumerate(FACTS)]
        print(f"{name}: {', '.join(shares)}, match {(match_counts[0] >= MIN_MATCH_ALONE).mean():.2f}", flush=True)


def add(file: Path, name: str, facts: np.ndarray, ngrams: np.ndarray) -> None:
    """Add a trace to a file, in the place of one of its name."""
    traces = {name: (facts, ngrams)}
    if file.exists():
        with np.load(file) as traces_file:
            pairs = zip(traces_file["facts"], traces_file["ngrams"], strict=True)
            traces = dict(zip(traces_file["names"].tolist(), pairs, strict=True)) | traces
    names = sorted(traces)
    facts_NT, ngrams_N2T = (np.stack(arrays) for arrays in zip(*(traces[name] for name in names), strict=True))
    np.savez_compressed(file, names=np.array(names), facts=facts_NT, ngrams=ngrams_N2T)


main = study.command("acceptance_traces", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())
