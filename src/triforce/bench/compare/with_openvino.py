"""OpenVINO GenAI, which reads the same GGUF file; variants: the precision of its KV cache, lookup in the prompt.

Its speculative decoding takes no draft model from a GGUF file.
"""

from __future__ import annotations

from typing import Any

from triforce.bench.compare.gguf_file import converted
from triforce.bench.compare.worker import Clock, Task, work


def run(task: Task) -> dict[str, Any]:
    import numpy as np
    import openvino
    import openvino_genai

    way: str = task["variant"]
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": task["threads"], "PERFORMANCE_HINT": "LATENCY"}
    config = openvino_genai.GenerationConfig()
    if way == "lookup":
        settings["prompt_lookup"] = True
        config.num_assistant_tokens, config.max_ngram_size = 10, 3
    elif way != "default":
        settings["KV_CACHE_PRECISION"] = way
    pipe = openvino_genai.LLMPipeline(str(converted(task["model"], task["work"])), "CPU", **settings)
    config.max_new_tokens, config.ignore_eos, config.do_sample = task["tokens"], True, False
    ids_1T = np.array([task["ids"]], dtype=np.int64)
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids_1T), openvino.Tensor(np.ones_like(ids_1T)))
    clock, ids = Clock(), list[int]()

    class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]
        def write(self, token: Any) -> Any:
            ids.extend(token if isinstance(token, list) else [token])
            clock.tick(len(ids))
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    pipe.generate(inputs, config, Streamer())
    return clock.result(ids) | {"version": openvino_genai.__version__}


if __name__ == "__main__":
    work(run)
