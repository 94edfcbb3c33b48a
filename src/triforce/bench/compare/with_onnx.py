"""ONNX Runtime GenAI, on a model that its own builder makes; the variant is the precision of the weights."""

from __future__ import annotations

import subprocess
import sys
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
    """Made by the builder that comes with it, which is a script and wants to be run as one."""
    import onnxruntime_genai

    folder = Path(task["work"]) / f"onnx-{task['variant']}"
    if not (folder / "genai_config.json").exists():
        builder = Path(onnxruntime_genai.__file__).parent / "models" / "builder.py"
        asked = [*f"-p {task['variant']} -e cpu".split(), "-i", task["model"], "-o", folder, "-c", folder / "cache"]
        made = subprocess.run([sys.executable, builder, *asked], capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"its builder says: {made.stderr.strip().splitlines()[-1]}")
    return folder


if __name__ == "__main__":
    work(run)
