"""vLLM's CPU build. It tells nothing until a text is done: a text of one token is the prefill of a longer one."""

from __future__ import annotations

import os

from benchmarks.compare.workers.clock import Clock, Generate, Result, Task, Turn


def load(task: Task) -> Generate:
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(task["threads"])}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the cores are counted
    import vllm

    llm = vllm.LLM(
        task["model"], dtype="bfloat16", max_model_len=task["positions"], enable_prefix_caching=False,
        enforce_eager=task["settings"]["eager"],
    )  # fmt: skip

    def generate(turn: Turn) -> Result:
        prompt = {"prompt_token_ids": turn["ids"]}
        clocks = []
        for tokens in (1, turn["tokens"]):
            clock = Clock()
            params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            clock.tick(tokens)
            clocks.append(clock)
        (first_began, first_ticks), (began, all_ticks) = ((clock.began, clock.ticks[0]) for clock in clocks)
        prefill = first_ticks[0] - first_began
        total_seconds = all_ticks[0] - began
        busy = (all_ticks[1] - first_ticks[1]) / total_seconds  # prefill included: it cannot be told apart
        return {
            "prefill_seconds": prefill, "seconds": total_seconds - prefill, "decoded": turn["tokens"] - 1,
            "busy_cores": busy,
            "ids": list(output.outputs[0].token_ids), "version": vllm.__version__,
        }  # fmt: skip

    return generate
