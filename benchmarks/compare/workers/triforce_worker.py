"""Triforce, through its public interface. Its settings are those of `LLM`; a turn's is its `mode`."""

from __future__ import annotations

from benchmarks.compare.workers.clock import Clock, Generate, Result, Task, Turn

SHORT = 512, 8
"""Prompt and text of the first turn of a mode, which takes a look at what passes cost."""


def load(task: Task) -> Generate:
    from triforce import LLM, SamplingParams, __version__
    from triforce.interface.outputs import RequestOutput

    llm = LLM(task["model"], **({"draft": task["draft"], "device": "cpu"} | task["settings"]))  # as all others are
    warm = set[str]()

    def generate(turn: Turn) -> Result:
        mode: str = turn["settings"]["mode"]
        if mode not in warm:
            warm.add(mode)
            generate(turn | {"ids": turn["ids"][: SHORT[0]], "tokens": SHORT[1], "fresh": True})
            turn = turn | {"fresh": True}
        if turn["fresh"]:
            llm.reset_prefix_cache()
        clock = Clock()
        new_ids = list[int]()
        params = SamplingParams(
            temperature=turn["temperature"], top_p=1.0, seed=turn["seed"], max_tokens=turn["tokens"], ignore_eos=True
        )
        for piece in llm.stream(turn["ids"], params, mode=mode):
            if not isinstance(piece, RequestOutput):
                new_ids += piece.token_ids
                clock.tick(len(new_ids))
        return clock.result(new_ids, __version__)

    return generate
