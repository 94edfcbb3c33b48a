"""llama.cpp, by llama-cpp-python, on a GGUF file in f16; variants: its flash attention, and lookup in the prompt."""

from __future__ import annotations

from typing import Any

from triforce.bench.compare.gguf_file import converted
from triforce.bench.compare.worker import Clock, Task, work


def run(task: Task) -> dict[str, Any]:
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = LlamaPromptLookupDecoding(num_pred_tokens=10) if task["variant"] == "lookup" else None
    llm = llama_cpp.Llama(
        str(converted(task["model"], task["work"])),
        n_ctx=len(task["ids"]) + task["tokens"] + 8,
        n_threads=task["threads"],
        n_threads_batch=task["threads"],
        n_batch=512,
        flash_attn=task["variant"] == "flash attention",
        draft_model=lookup,
        logits_all=lookup is not None,  # else it fails
        verbose=False,
    )
    clock, ids = Clock(), list[int]()
    for token in llm.generate(task["ids"], temp=0.0, reset=True):
        ids.append(int(token))
        clock.tick(len(ids))
        if len(ids) == task["tokens"]:
            break
    return clock.result(ids) | {"version": llama_cpp.__version__}


if __name__ == "__main__":
    work(run)
