"""Traces of acceptance, which tests replay through the planner (tests/planner/test_regret.py).

    python -m benchmarks.acceptance_traces TEXT.txt --context 8192 --temperature 0.6 --workload books OUT.npz

A text is sampled under `seeded`, and then read again: each tier is asked for every token, with all before it right. As
tiers share their noise, that says what any plan would have had accepted. Bits are in `FACTS`; matches and hits are
those of n-grams. Selections are as old as in a text whose verifications are `BLOCK` tokens apart.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from triforce import LLM, SamplingParams
from triforce.bench.prompts import MAKERS, Sources, prompts
from triforce.engine.modes import MODES, unlinked
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import prefill_batch
from triforce.eval import Text
from triforce.kvcache import RetrievalView
from triforce.planner.acceptance import MAX_GAMMA
from triforce.speculation import Draft, Tier
from triforce.speculation.ngram import ALONE, TRIED, NgramIndex

TOKENS = 1024  # of a trace
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
        tiers = {tier.name: tier for tier in unlinked(self.batch.top) if isinstance(tier, Tier)}
        view, facts = tiers["retrieval"].cache, np.zeros(TOKENS, np.uint8)
        assert isinstance(view, RetrievalView)
        for start in range(0, TOKENS, BLOCK):
            true = self.text[start : start + BLOCK]
            said = {}
            for name, times in (("retrieval x0.5", 0.5), ("retrieval x2", 2.0), ("retrieval", 1.0)):
                view.times = {} if times == 1 else {int(self.batch.prefix.lengths_B[0] - 1).bit_length(): times}
                view.selections[0].pages = None
                said[name] = self.picks(tiers["retrieval"], true)
            said["draft"] = self.picks(tiers["draft"], true) if "draft" in tiers else [-1] * BLOCK
            assert self.picks(tiers["full"], true) == true, "the text is another one"
            for i in range(BLOCK):
                right = [said[name][i] == true[i] for name in FACTS[:-1]]
                facts[start + i] = sum(
                    bit << n for n, bit in enumerate([*right, said["draft"][i] == said["retrieval"][i]])
                )
            longer = self.batch.prefix.append(drafted(true))
            for tier in tiers.values():
                if tier.name != "full":
                    tier.rewind(longer)
            tiers["full"].cache.advance(np.array([len(true)]))
            self.batch.prefix = longer
        return facts

    def picks(self, tier: Tier[Any], true: list[int]) -> list[int]:
        """The token of a tier at each place, with all before it right. Its cache is as before."""
        prefix, sampling = self.batch.prefix, self.batch.sampling
        logits_BJV = tier.score(prefix, drafted(true), LIVE)
        nothing = Draft.empty(1, sampling.coupling.probs_size(sampling.vocab_size))
        found = []
        for j in range(len(true)):
            longer = prefix.append(drafted(true[:j]))
            column = logits_BJV[:, j : j + 1].contiguous()
            found.append(int(sampling.verify(nothing, column, longer, LIVE, tier.level).tokens_BK[0, 0]))
        tier.rewind(prefix)
        return found


def drafted(tokens: list[int]) -> Draft:
    """A proposal of these tokens."""
    tokens_BK = np.array([tokens], dtype=np.int64).reshape(1, -1)
    probs_BKV = torch.zeros(1, len(tokens), 0, dtype=torch.float64)
    return Draft(tokens_BK, probs_BKV, np.zeros_like(tokens_BK), np.array([len(tokens)]))


def ngrams(prompt: list[int], text: list[int]) -> np.ndarray:
    """Matches and hits (2, TRIED + TOKENS) at each place from `TRIED` before the prompt's end on."""
    ids, index = np.array(prompt + text), NgramIndex(ALONE)
    found = np.zeros((2, TRIED + TOKENS), np.uint8)
    for i in range(TRIED + TOKENS):
        place = len(prompt) - TRIED + i
        index.read(ids[:place])
        match, after = index.match(ids[:place])
        if match:
            wrong = np.resize(ids[after:place], MAX_GAMMA) != ids[place : place + MAX_GAMMA]
            found[:, i] = match, int(wrong.argmax()) if wrong.any() else MAX_GAMMA
    return found


def record(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the facts and the n-grams of one text."""
    (output,) = llm.generate([prompt], params, mode="triforce" if llm.draft else "retrieval")
    text = output.outputs[0].token_ids
    assert params.seed is not None
    sequence = TokenSequence(prompt, params, params.seed)
    batch = SequenceBatch(llm.models, MODES["auto"], llm.speculation, "seeded", [sequence])
    deque(prefill_batch(batch), maxlen=0)
    with torch.no_grad():
        return Reading(batch, text).facts(), ngrams(prompt, text)


def main(options: Namespace) -> None:
    llm = LLM(options.model, None if options.model else "auto", retrieval_budget="auto", searched_layers="none")
    text, kind = options.text.read_text(encoding="utf-8")[options.skip :], options.kind
    assert llm.tokenizer
    ids = torch.tensor(llm.tokenizer.encode(text[: 8 * options.context + 80_000], add_special=False))
    sources = Sources(llm.tokenizer, [Text(options.text.stem, kind, ids)])
    (prompt,) = prompts(sources, options.workload, options.context, 1)
    for temperature in options.temperature:
        params = SamplingParams(temperature, top_p=0.9, seed=7, max_tokens=TOKENS + MAX_GAMMA, ignore_eos=True)
        facts, found = record(llm, prompt, params)
        name = f"{options.model.stem if options.model else 'pair'} {options.workload} {options.context} {temperature:g}"
        np.savez_compressed(options.out / f"{name.replace(' ', '_')}_{options.text.stem[:8]}.npz", facts, found)
        shares = [f"{name} {(facts >> n & 1).mean():.3f}" for n, name in enumerate(FACTS)]
        print(f"{name}: {', '.join(shares)}, match {(found[0] > 2).mean():.2f}", flush=True)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--kind", default="prose")
    parser.add_argument("--skip", type=int, default=20_000)
    parser.add_argument("--workload", choices=list(MAKERS), default="books")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.6])
    main(parser.parse_args())
