"""llama.cpp, by llama-cpp-python, on a GGUF file.

Settings: `flash`, `ubatch` and `kv`, a type of ggml. A turn's is `lookup`, a number of draft tokens from the
prompt, or `python`: the texts of `Llama.generate`. All others are made here, by llama.cpp's functions for a pass and
for a draw, so that nothing of the package is in their way: with draft tokens its own loop wants the logits of the
whole prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.compare.gguf_file import gguf_of
from benchmarks.compare.workers.clock import Clock, Generate, Result, Task, Turn, common_tokens

BATCH = 2048
"""Tokens that are handed over at a time, as by its own programs; it cuts them into `ubatch`."""


def load(task: Task) -> Generate:
    return LlamaCpp(task).generate


class LlamaCpp:
    """A model with its context, and what is in there: the prompt that was read last."""

    def __init__(self, task: Task) -> None:
        import llama_cpp

        settings = task["settings"]
        self.api = llama_cpp
        self.llm = llama_cpp.Llama(
            str(gguf_of(task)),
            n_ctx=task["positions"],
            n_threads=task["threads"],
            n_threads_batch=task["threads"],
            n_batch=BATCH,
            n_ubatch=settings["ubatch"],
            flash_attn=settings["flash"],
            type_k=settings.get("kv"),
            type_v=settings.get("kv"),
            verbose=False,
        )
        self.built = llama_cpp.llama_print_system_info().decode()
        self.read: Sequence[int] = []

    def generate(self, turn: Turn) -> Result:
        """Make the text of a turn."""
        clock = Clock()
        new_ids = list[int]()
        settings = turn["settings"]
        if settings.get("python"):
            texts = self._by_package(turn)
        elif lookup := settings.get("lookup"):
            texts = self._by_lookup(turn, lookup)
        else:
            texts = self._plainly(turn)
        for tokens in texts:
            new_ids += tokens
            clock.tick(len(new_ids))
            if len(new_ids) >= turn["tokens"]:
                break
        return clock.result(new_ids, self.api.__version__) | {"built": self.built}

    def _plainly(self, turn: Turn) -> Iterator[list[int]]:
        token_array = (self.api.llama_token * 1)()
        self._prefill(turn["ids"], common_tokens(self.read, turn))
        with self._sampler(turn) as sampler:
            while True:
                token_array[0] = self.api.llama_sampler_sample(sampler, self.llm.ctx, -1)
                yield [token_array[0]]
                self._decode(self.api.llama_batch_get_one(token_array, 1))

    def _by_lookup(self, turn: Turn, count: int) -> Iterator[list[int]]:
        """Run prompt lookup: a pass over the last token and the draft. A draft token stays if the draw equals it."""
        import numpy as np
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        proposer = LlamaPromptLookupDecoding(num_pred_tokens=count)
        length = len(turn["ids"])
        text = np.zeros(length + turn["tokens"] + count + 1, dtype=np.intc)
        text[:length] = turn["ids"]
        self._prefill(turn["ids"], common_tokens(self.read, turn))
        with self._sampler(turn) as sampler, self._batch(count + 1) as batch:
            drawn = [self.api.llama_sampler_sample(sampler, self.llm.ctx, -1)]
            while True:
                yield drawn
                text[length : length + len(drawn)] = drawn
                length += len(drawn)
                self.api.llama_memory_seq_rm(self._memory, 0, length - 1, -1)
                draft_tokens = proposer(text[:length]).tolist()
                self._fill(batch, [drawn[-1], *draft_tokens], length - 1)
                self._decode(batch)
                drawn = []
                for n, draft_token in enumerate([*draft_tokens, None]):
                    drawn.append(self.api.llama_sampler_sample(sampler, self.llm.ctx, n))
                    if drawn[-1] != draft_token:
                        break

    def _by_package(self, turn: Turn) -> Iterator[list[int]]:
        ids = turn["ids"]
        self._prefill(ids[:-1], common_tokens(self.read, turn))
        self.llm.n_tokens = len(ids) - 1  # that is what it has read
        self.llm.input_ids[: len(ids) - 1] = ids[:-1]
        self.llm.set_seed(turn["seed"])
        for token in self.llm.generate(ids, temp=turn["temperature"], top_k=0, top_p=1.0, min_p=0.0):
            yield [int(token)]

    def _prefill(self, ids: list[int], cached_tokens: int) -> None:
        """Read a prompt whose first `cached_tokens` tokens are in the cache."""
        self.api.llama_memory_seq_rm(self._memory, 0, cached_tokens, -1)
        for start in range(cached_tokens, len(ids), BATCH):
            part = ids[start : start + BATCH]
            tokens = (self.api.llama_token * len(part))(*part)  # a batch only points to it
            self._decode(self.api.llama_batch_get_one(tokens, len(part)))
        self.read = ids

    def _decode(self, batch: Any) -> None:
        if code := self.api.llama_decode(self.llm.ctx, batch):
            raise RuntimeError(f"llama_decode returned {code}")

    def _fill(self, batch: Any, tokens: Sequence[int], position: int) -> None:
        batch.n_tokens = len(tokens)
        for n, token in enumerate(tokens):
            batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.logits[n] = token, position + n, 1, True
            batch.seq_id[n][0] = 0

    @contextmanager
    def _batch(self, tokens: int) -> Iterator[Any]:
        batch = self.api.llama_batch_init(tokens, 0, 1)
        try:
            yield batch
        finally:
            self.api.llama_batch_free(batch)

    @contextmanager
    def _sampler(self, turn: Turn) -> Iterator[Any]:
        """llama.cpp's own sampler: the likeliest token, or a draw from all of them at a temperature."""
        api = self.api
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        if turn["temperature"]:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(turn["temperature"]))
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(turn["seed"]))
        else:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_greedy())
        try:
            yield chain
        finally:
            api.llama_sampler_free(chain)

    @property
    def _memory(self) -> Any:
        return self.api.llama_get_memory(self.llm.ctx)
