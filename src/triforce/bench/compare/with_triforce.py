"""Worker of this engine, through its public interface; the variant is a mode."""

from __future__ import annotations

from typing import Any

from triforce.bench.compare.worker import Clock, Task, work


def run(task: Task) -> dict[str, Any]:
    from triforce import LLM, SamplingParams, __version__
    from triforce.interface.outputs import RequestOutput

    llm = LLM(task["model"], task["draft"], mode=task["variant"])
    for tokens in (8, task["tokens"]):  # the first time a look is taken at what passes cost
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        clock, ids = Clock(), list[int]()
        llm.reset_prefix_cache()
        for piece in llm.stream(task["ids"] if tokens > 8 else task["ids"][:512], params):
            if not isinstance(piece, RequestOutput):
                ids += piece.token_ids
                clock.tick(len(ids))
    return clock.result(ids) | {"version": __version__}


if __name__ == "__main__":
    work(run)
