"""Episodes: texts to train on, of the user and of the target, each by its number alone.

Shape suffixes: B rows, L tokens of an episode, N tokens of all texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from triforce.errors import RequestError
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.training.training_config import TrainingConfig

MOST = 32_000_000
"""Characters that are read, as much of each text as there is room for: some eight million tokens."""
HELD_OUT = 16
"""One token of so many is held out, at the end of each text."""
QUESTIONS = (
    "What is this text about?",
    "Summarize this in a few sentences.",
    "Explain the following to somebody who has never heard of it.",
    "Which names and places are mentioned here, and what is said of them?",
    "Go on from here in the same style.",
)


@dataclass(frozen=True, slots=True)
class Texts:
    """All texts behind one another: those to train on, and those held out; and what each prompt begins with."""

    trained_N: Tensor
    heldout_N: Tensor
    start: list[int]

    @staticmethod
    def of(llm: LLM, texts: Mapping[str, str], width: int) -> Texts:
        """Tokenize texts. Raises RequestError where there are too few tokens to train on."""
        if llm.tokenizer is None:
            raise RequestError("a draft is trained on texts, and this model has no tokenizer; add tokenizer.json")
        start = llm.tokenizer.encode("")
        read = [llm.tokenizer.encode(text)[len(start) :] for text in middles(list(texts.values()), MOST)]
        ids = [torch.tensor(each, dtype=torch.long) for each in read]
        ends = [0, *accumulate(map(len, ids))]  # short texts give some of them, too
        cuts = [end - first - (end // HELD_OUT - first // HELD_OUT) for first, end in pairwise(ends)]
        trained_N = torch.cat([each[:cut] for each, cut in zip(ids, cuts, strict=True)])
        heldout_N = torch.cat([each[cut:] for each, cut in zip(ids, cuts, strict=True)])
        if len(heldout_N) <= width:
            raise RequestError(
                f"the texts have {sum(map(len, ids)):,} tokens, and a training needs {(width + 1) * HELD_OUT:,}; "
                "give --texts a folder with more of them"
            )
        return Texts(trained_N, heldout_N, start)

    def windows(self, ids_N: Tensor, rows: int, length: int, dice: torch.Generator) -> Tensor:
        """Return windows of so many tokens at random places, (B, L), each as a prompt begins."""
        length -= len(self.start)
        first_B = torch.randint(len(ids_N) - length + 1, (rows,), generator=dice)
        start_BS = torch.tensor(self.start, dtype=torch.long).expand(rows, -1)
        return torch.cat((start_BS, torch.stack([ids_N[first : first + length] for first in first_B.tolist()])), 1)

    def frequent(self, count: int, vocab_size: int) -> Tensor:
        """Return the most frequent tokens, int64 (M), ascending; of equals those that the tokenizer has first."""
        counts_V = torch.bincount(self.trained_N, minlength=vocab_size)
        return counts_V.argsort(descending=True, stable=True)[:count].sort().values


def middles(texts: Sequence[str], most: int) -> list[str]:
    """Return so many characters of texts in all, out of the middle of those that are longer than their share."""
    room, share = most, most
    for left, length in zip(range(len(texts), 0, -1), sorted(map(len, texts)), strict=True):
        share = room // left
        if length > share:
            break
        room -= length
    starts = [max(0, len(text) - share) // 2 for text in texts]
    return [text[start : start + share] for text, start in zip(texts, starts, strict=True)]


class Episodes:
    """Texts of the user, and every so often the target's own: answers to windows of these texts."""

    def __init__(self, llm: LLM, texts: Texts, config: TrainingConfig) -> None:
        self.llm, self.texts, self.config = llm, texts, config
        longest = min(len(texts.trained_N) // 2, llm.target.config.context)
        self.lengths = config.lengths(longest)

    def __call__(self, index: int) -> Tensor:
        """Return the tokens of an episode, (B, L)."""
        config, dice = self.config, torch.Generator().manual_seed(self.config.seed * 1_000_003 + index)
        if index % config.own_every == config.own_every - 1:
            rows = config.rows * config.groups
            return self.answers(self.texts.trained_N, config.width, index, config.temperatures, rows, dice)
        shares = torch.tensor([1 / length for length in self.lengths])  # as many tokens of each length
        length = self.lengths[int(shares.multinomial(1, generator=dice))]
        rows = config.rows * max(1, config.groups * config.width // length)
        return self.texts.windows(self.texts.trained_N, rows, length, dice)

    def answers(
        self,
        ids_N: Tensor,
        length: int,
        seed: int,
        temperatures: tuple[float, ...],
        rows: int,
        dice: torch.Generator,
    ) -> Tensor:
        """Return windows of texts and what the target continues them with, about half of each: (B, L).

        A model that chats is asked about every second of them.
        """
        prompts = self.texts.windows(ids_N, rows, length // 2, dice).tolist()
        prompts = [self._asked(ids, seed, length) if b % 2 else ids for b, ids in enumerate(prompts)]
        params = [
            SamplingParams(temperature=temperatures[(seed + b) % len(temperatures)], seed=seed + b,
                           max_tokens=length - len(ids), ignore_eos=True)
            for b, ids in enumerate(prompts)
        ]  # fmt: skip
        outputs = self.llm.generate(prompts, params, mode="ar")
        new = [list(output.outputs[0].token_ids) for output in outputs]
        return torch.tensor([prompt + ids for prompt, ids in zip(prompts, new, strict=True)])

    def _asked(self, ids: list[int], seed: int, length: int) -> list[int]:
        """Return a question on most of a window as a chat, or the window itself where the model does not chat."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None or not tokenizer.chats:
            return ids
        excerpt = tokenizer.decode(ids[len(self.texts.start) : -(len(ids) // 4)])
        question = f"{QUESTIONS[seed % len(QUESTIONS)]}\n\n{excerpt}"
        asked = tokenizer.chat([{"role": "user", "content": question}])
        return asked if len(asked) < length * 3 // 4 else ids
