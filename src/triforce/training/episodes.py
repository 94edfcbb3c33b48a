"""Episodes: training texts from the user and from the target. An episode depends on its number only.

Shape suffixes: B rows, L tokens of an episode, N tokens of all texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from triforce.backends.decoder import Decoder
from triforce.backends.torch.tensors import as_tensor
from triforce.engine.tier_builder import ModelSet, SpeculativeConfig, TierBuilder
from triforce.errors import RequestError
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.ragged import ints
from triforce.training.training_config import TrainingConfig

MAX_CHARACTERS = 32_000_000
"""Characters that are read of all texts, shared among them: about eight million tokens."""
HELD_OUT = 16
"""One token in `HELD_OUT` is held out, at the end of each text."""
QUESTIONS = (
    "What is this text about?",
    "Summarize this in a few sentences.",
    "Explain the following to somebody who has never heard of it.",
    "Which names and places are mentioned here, and what is said of them?",
    "Go on from here in the same style.",
)


@dataclass(frozen=True, slots=True)
class Texts:
    """Tokens of all texts, concatenated: training and held-out ones. start: tokens that every prompt begins with."""

    trained_N: Tensor
    heldout_N: Tensor
    start: list[int]

    @staticmethod
    def of(llm: LLM, texts: Mapping[str, str], width: int) -> Texts:
        """Tokenize texts and hold out the end of each. Raises RequestError if there are too few tokens to train on."""
        if llm.tokenizer is None:
            raise RequestError("a draft is trained on texts, and this model has no tokenizer; add tokenizer.json")
        start = llm.tokenizer.encode("")
        encoded_texts = [
            llm.tokenizer.encode(text)[len(start) :] for text in middle_excerpts(list(texts.values()), MAX_CHARACTERS)
        ]
        ids = [torch.tensor(text_ids, dtype=torch.long) for text_ids in encoded_texts]
        ends = [0, *accumulate(map(len, ids))]  # cumulative, so that short texts are held out in part, too
        cuts = [end - begin - (end // HELD_OUT - begin // HELD_OUT) for begin, end in pairwise(ends)]
        trained_N = torch.cat([text_ids[:cut] for text_ids, cut in zip(ids, cuts, strict=True)])
        heldout_N = torch.cat([text_ids[cut:] for text_ids, cut in zip(ids, cuts, strict=True)])
        if len(heldout_N) <= width:
            raise RequestError(
                f"the texts have {sum(map(len, ids)):,} tokens, and a training needs {(width + 1) * HELD_OUT:,}; "
                "give --texts a folder with more of them"
            )
        return Texts(trained_N, heldout_N, start)

    def windows(self, ids_N: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Return `rows` windows of `length` tokens at random positions, (B, L). Each begins with `start`."""
        length -= len(self.start)
        begin_B = torch.randint(len(ids_N) - length + 1, (rows,), generator=generator)
        start_BS = torch.tensor(self.start, dtype=torch.long).expand(rows, -1)
        return torch.cat((start_BS, torch.stack([ids_N[begin : begin + length] for begin in begin_B.tolist()])), 1)

    def frequent(self, count: int, vocab_size: int) -> Tensor:
        """Return the `count` most frequent tokens, int64 (M), ascending. Lower ids win ties."""
        counts_V = torch.bincount(self.trained_N, minlength=vocab_size)
        return counts_V.argsort(descending=True, stable=True)[:count].sort().values


def middle_excerpts(texts: Sequence[str], max_characters: int) -> list[str]:
    """Return excerpts of at most `max_characters` in all. A text longer than its share gives its middle."""
    remaining_characters = max_characters
    share = max_characters
    for remaining_texts, length in zip(range(len(texts), 0, -1), sorted(map(len, texts)), strict=True):
        share = remaining_characters // remaining_texts
        if length > share:
            break
        remaining_characters -= length
    starts = [max(0, len(text) - share) // 2 for text in texts]
    return [text[start : start + share] for text, start in zip(texts, starts, strict=True)]


class Episodes:
    """Episodes of the user's texts and, every `own_every` episodes, of the target's answers to windows of them."""

    def __init__(self, llm: LLM, texts: Texts, config: TrainingConfig) -> None:
        self.llm = llm
        self.texts = texts
        self.config = config
        longest = min(len(texts.trained_N) // 2, llm.target.config.context)
        self.lengths = config.lengths(longest)

    def __call__(self, index: int) -> Tensor:
        """Return the tokens of an episode, (B, L)."""
        config = self.config
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + index)
        if index % config.own_every == config.own_every - 1:
            rows = config.rows * config.groups
            return self.answers(self.texts.trained_N, config.width, index, config.temperatures, rows, generator)
        shares = torch.tensor([1 / length for length in self.lengths])  # the same number of tokens of each length
        length = self.lengths[int(shares.multinomial(1, generator=generator))]
        rows = config.rows * max(1, config.groups * config.width // length)
        return self.texts.windows(self.texts.trained_N, rows, length, generator)

    def answers(
        self,
        ids_N: Tensor,
        length: int,
        seed: int,
        temperatures: tuple[float, ...],
        rows: int,
        generator: torch.Generator,
    ) -> Tensor:
        """Return windows of texts with the target's continuations, about half of each: (B, L).

        A chat model is asked a question about every second window.
        """
        prompts = self.texts.windows(ids_N, rows, length // 2, generator).tolist()
        prompts = [self._question_prompt(ids, seed, length) if b % 2 else ids for b, ids in enumerate(prompts)]
        params = [
            SamplingParams(temperature=temperatures[(seed + b) % len(temperatures)], seed=seed + b,
                           max_tokens=length - len(ids), ignore_eos=True)
            for b, ids in enumerate(prompts)
        ]  # fmt: skip
        outputs = self.llm.generate(prompts, params, mode="ar")
        answer_ids = [list(output.outputs[0].token_ids) for output in outputs]
        return torch.tensor([prompt + ids for prompt, ids in zip(prompts, answer_ids, strict=True)])

    def _question_prompt(self, ids: list[int], seed: int, length: int) -> list[int]:
        """Return a chat prompt with a question on most of a window; the window itself if the model does not chat."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None or not tokenizer.chats:
            return ids
        excerpt = tokenizer.decode(ids[len(self.texts.start) : -(len(ids) // 4)])
        question = f"{QUESTIONS[seed % len(QUESTIONS)]}\n\n{excerpt}"
        chat_ids = tokenizer.chat([{"role": "user", "content": question}])
        return chat_ids if len(chat_ids) < length * 3 // 4 else ids


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a chunk, at slots that all rows share, with the target's hidden states of them."""

    ids_BT: Tensor
    slots_BT: Tensor
    states_BTX: Tensor
    """States after the preceding token. The entry of a token is computed from them."""
    embeddings_BTC: Tensor
    final_BTC: Tensor
    """States of each token after the last layer. The distribution of the next token is computed from them."""
    logits_BTV: Tensor | None = None
    """Logits of each token, if requested."""

    def to(self, dtype: torch.dtype) -> Chunk:
        """Return the chunk with states and embeddings in `dtype`."""
        states = {name: getattr(self, name).to(dtype) for name in ("states_BTX", "embeddings_BTC", "final_BTC")}
        return replace(self, **states)


class TargetStream:
    """Texts that the target prefills from their start, one a row, at most `capacity` tokens each."""

    def __init__(self, decoder: Decoder, layers: tuple[int, ...], rows: int, capacity: int) -> None:
        self.decoder = decoder
        self.layers = layers
        self.view = TierBuilder(ModelSet(decoder), SpeculativeConfig(), [capacity] * rows).full_view()
        self.last_B1X = torch.zeros(rows, 1, len(layers) * decoder.config.hidden_size)

    def read(self, ids_BT: Tensor, *, logits: bool = False) -> Chunk:
        """Feed the next tokens of each row. logits: of all tokens, too; they are many times as large as the states."""
        (B, T), start, counts_B = ids_BT.shape, int(self.view.lengths_B[0]), ints([ids_BT.shape[1]] * len(ids_BT))
        at_BJ = None if logits else np.full((B, 1), T - 1)  # the last layer is computed only where logits are
        layers = (*self.layers, self.decoder.config.layers)
        _, output = self.decoder.observe(ids_BT.numpy(), counts_B, self.view, at_BJ, layers)
        assert output.states_SBTC is not None
        *states, final_BTC = as_tensor(output.states_SBTC).float()
        states_BTX = torch.cat(states, -1)
        past_states_BTX = torch.cat((self.last_B1X, states_BTX[:, :-1]), 1)
        self.last_B1X = states_BTX[:, -1:]
        slots_BT = torch.arange(start, start + T).expand(B, T)
        embeddings_NC = as_tensor(self.decoder.model.embed(ids_BT.numpy().flatten()))
        embeddings_BTC = embeddings_NC.float().view(B, T, -1)
        logits_BTV = as_tensor(output.logits_BJV) if logits else None
        return Chunk(ids_BT, slots_BT, past_states_BTX, embeddings_BTC, final_BTC, logits_BTV)


Text = list[Chunk]
"""Chunks of `rows` texts side by side, in order. States are bfloat16."""


class EpisodeReader:
    """Prefills episodes through the target and caches them for repeats. layers: the layers that give states."""

    def __init__(self, decoder: Decoder, layers: tuple[int, ...], episodes: Episodes, config: TrainingConfig) -> None:
        self.decoder = decoder
        self.layers = layers
        self.episodes = episodes
        self.config = config
        self._cached_texts: dict[int, list[Text]] = {}

    def __call__(self, number: int) -> Iterator[Text]:
        """Yield the texts of an episode. An episode that is not cached whole is read again, with the same result."""
        if number in self._cached_texts:
            yield from self._cached_texts[number]
            return
        latest_repeat = max(self.config.again, default=0)
        read_texts = list[Text]()
        self._cached_texts = {
            past_number: texts
            for past_number, texts in self._cached_texts.items()
            if past_number + latest_repeat >= number
        }
        for text in self.texts(self.episodes(number)):
            read_texts.append(text)
            yield text
        self._cached_texts[number] = read_texts

    def texts(self, ids_BL: Tensor) -> Iterator[Text]:
        """Prefill texts through the target, `rows` at a time; yield the chunks of each group."""
        for rows_BL in torch.split(ids_BL, self.config.rows):
            stream = TargetStream(self.decoder, self.layers, *rows_BL.shape)
            parts = torch.split(rows_BL, self.config.width, 1)
            yield [stream.read(ids_BT).to(torch.bfloat16) for ids_BT in parts]
