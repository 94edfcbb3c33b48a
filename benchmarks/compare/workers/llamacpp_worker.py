"""llama.cpp, by llama-cpp-python, on a GGUF file.

Settings: `flash`, `ubatch` and `kv`, a type of ggml. A turn's is `lookup`, a number of draft tokens from the
prompt, `width`, of passes to be timed, or `python`: the texts of `Llama.generate`. All others are made here, by
llama.cpp's functions for a pass and for a draw, so that nothing of the package is in their way: with draft tokens its
own loop wants the logits of the whole prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.compare.gguf_file import gguf_of
from benchmarks.compare.workers.clock import Generate, Task, Turn
from benchmarks.compare.workers.token_loop import BATCH, Draw, Proposer, TokenLoop


def load(task: Task) -> Generate:
    return LlamaCpp(task).generate


class LlamaCpp(TokenLoop):
    def __init__(self, task: Task) -> None:
        import llama_cpp

        settings = task["settings"]
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
        built = llama_cpp.llama_print_system_info().decode()
        super().__init__(llama_cpp, self.llm.ctx, llama_cpp.__version__, built)

    def texts(self, turn: Turn) -> Iterator[list[int]]:
        return self._by_package(turn) if turn["settings"].get("python") else super().texts(turn)

    def _by_package(self, turn: Turn) -> Iterator[list[int]]:
        ids = turn["ids"]
        self.prefill(turn, ids[:-1])
        self.llm.n_tokens = len(ids) - 1  # that is what it has read
        self.llm.input_ids[: len(ids) - 1] = ids[:-1]
        self.llm.set_seed(turn["seed"])
        for token in self.llm.generate(ids, temp=turn["temperature"], top_k=0, top_p=1.0, min_p=0.0):
            yield [int(token)]

    def forget(self, length: int) -> None:
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, length, -1)

    @contextmanager
    def drawing(self, turn: Turn) -> Iterator[Draw]:
        """llama.cpp's own sampler: the likeliest token, or a draw from all of them at a temperature."""
        api = self.api
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        if turn["temperature"]:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(turn["temperature"]))
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(turn["seed"]))
        else:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_greedy())
        try:
            yield lambda place: int(api.llama_sampler_sample(chain, self.context, place))
        finally:
            api.llama_sampler_free(chain)

    def proposing(self, turn: Turn) -> Proposer:
        """Return the package's lookup."""
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        lookup = LlamaPromptLookupDecoding(num_pred_tokens=turn["settings"]["lookup"])
        return lambda text: lookup(text).tolist()
