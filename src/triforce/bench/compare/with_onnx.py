"""ONNX Runtime GenAI, on a model that its own builder makes; the variant is the precision of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triforce.bench.compare.worker import Clock, Task, work


def run(task: Task) -> dict[str, Any]:
    import onnxruntime_genai

    folder = _built(task)
    config = onnxruntime_genai.Config(str(folder))
    config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {task["threads"]}}}}}}}}}')
    model = onnxruntime_genai.Model(config)
    params = onnxruntime_genai.GeneratorParams(model)
    length = len(task["ids"]) + task["tokens"]
    params.set_search_options(do_sample=False, min_length=length, max_length=length)
    generator = onnxruntime_genai.Generator(model, params)
    clock, ids = Clock(), list[int]()
    generator.append_tokens(task["ids"])
    while not generator.is_done() and len(ids) < task["tokens"]:
        generator.generate_next_token()
        ids.append(int(generator.get_next_tokens()[0]))
        clock.tick(len(ids))
    return clock.result(ids) | {"version": onnxruntime_genai.__version__}


def _built(task: Task) -> Path:
    from onnxruntime_genai.models.builder import create_model

    folder = Path(task["work"]) / f"onnx-{task['variant']}"
    if not (folder / "genai_config.json").exists():
        create_model("", task["model"], str(folder), task["variant"], "cpu", str(folder / "cache"))
    return folder


if __name__ == "__main__":
    work(run)
