"""OpenVINO GenAI, which reads GGUF files itself.

Its settings are the pipeline's; a turn's is `lookup`, a number of draft tokens from the prompt. Its speculative
decoding takes no draft model from a GGUF file.
"""

from __future__ import annotations

from typing import Any

from benchmarks.compare.gguf_file import gguf_of
from benchmarks.compare.workers.clock import Clock, Generate, Result, Task, Turn

NGRAM = 3
"""Tokens at most that a lookup compares."""


def load(task: Task) -> Generate:
    import numpy as np
    import openvino
    import openvino_genai

    settings = {"INFERENCE_NUM_THREADS": task["threads"], "PERFORMANCE_HINT": "LATENCY", **task["settings"]}
    pipe = openvino_genai.LLMPipeline(str(gguf_of(task)), "CPU", **settings)
    renewed = 0

    def generate(turn: Turn) -> Result:
        nonlocal renewed
        ids_1T = np.array([turn["ids"]], dtype=np.int64)
        if turn["fresh"]:  # it knows prompts by how they begin, and forgets none that is asked for
            renewed += 1
            ids_1T[0, 0] = renewed
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids_1T), openvino.Tensor(np.ones_like(ids_1T)))
        clock, new_ids = Clock(), list[int]()

        class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]
            def write(self, token: Any) -> Any:
                new_ids.extend(token if isinstance(token, list) else [token])
                clock.tick(len(new_ids))
                return openvino_genai.StreamingStatus.RUNNING

            def end(self) -> None: ...

        pipe.generate(inputs, _config(turn), Streamer())
        return clock.result(new_ids, openvino_genai.__version__)

    return generate


def _config(turn: Turn) -> Any:
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = turn["tokens"]
    config.ignore_eos = True
    config.do_sample = turn["temperature"] > 0
    if turn["temperature"]:
        config.temperature = turn["temperature"]
        config.rng_seed = turn["seed"]
    if lookup := turn["settings"].get("lookup"):
        config.num_assistant_tokens = lookup
        config.max_ngram_size = NGRAM
    return config
