"""ONNX Runtime GenAI, on a model that its own builder makes. Settings: `precision`, and the builder's `options`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.compare.workers.clock import Clock, Generate, Result, Task, Turn, common_tokens


def load(task: Task) -> Generate:
    import onnxruntime_genai

    config = onnxruntime_genai.Config(str(_built(task)))
    config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {task["threads"]}}}}}}}}}')
    model = onnxruntime_genai.Model(config)
    made_for: dict[float, Any] = {}
    read: dict[float, list[int]] = {}

    def generate(turn: Turn) -> Result:
        temperature = turn["temperature"]
        ids = turn["ids"]
        if temperature not in made_for:
            made_for[temperature] = onnxruntime_genai.Generator(model, _params(model, task["positions"], turn))
        generator = made_for[temperature]
        cached_tokens = common_tokens(read.get(temperature, []), turn)
        if read.get(temperature):
            generator.rewind_to(cached_tokens)
        clock = Clock()
        new_ids = list[int]()
        generator.append_tokens(ids[cached_tokens:])
        while len(new_ids) < turn["tokens"]:
            generator.generate_next_token()
            new_ids.append(int(generator.get_next_tokens()[0]))
            clock.tick(len(new_ids))
        read[temperature] = ids
        return clock.result(new_ids, onnxruntime_genai.__version__)

    return generate


def _params(model: Any, length: int, turn: Turn) -> Any:
    """Return how texts are drawn: where they are, of the 50 likeliest tokens, as to draw from all is slow there."""
    import onnxruntime_genai

    params = onnxruntime_genai.GeneratorParams(model)
    params.set_search_options(do_sample=turn["temperature"] > 0, min_length=length, max_length=length)
    if turn["temperature"]:
        params.set_search_options(temperature=turn["temperature"], top_k=50, top_p=1.0, random_seed=turn["seed"])
    return params


def _built(task: Task) -> Path:
    """Made by the builder that comes with it, which is a script and wants to be run as one."""
    import onnxruntime_genai

    precision = task["settings"]["precision"]
    options = task["settings"].get("options", [])
    folder = Path(task["work"]) / "-".join(["onnx", precision, *options]).replace("=", "-")
    if not (folder / "genai_config.json").exists():
        builder = Path(onnxruntime_genai.__file__).parent / "models" / "builder.py"
        asked = [*f"-p {precision} -e cpu".split(), "-i", task["model"], "-o", folder, "-c", folder / "cache"]
        extra = ["--extra_options", *options] if options else []
        build_run = subprocess.run([sys.executable, builder, *asked, *extra], capture_output=True, text=True)
        if build_run.returncode:
            raise RuntimeError(f"its builder says: {build_run.stderr.strip().splitlines()[-1]}")
    return folder
