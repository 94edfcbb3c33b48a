"""Worker process of `start`: times one start to a first token, step by step.

Run as: python -m triforce.bench.start_worker JSON. It prints a JSON object of seconds by step, with `end` on the
system's clock, or an object with the message of a TriforceError as `error`.
"""

from __future__ import annotations

import json
import sys
from time import time
from typing import Any

from triforce.errors import TriforceError


def first_token(task: dict[str, Any]) -> dict[str, float]:
    """Return seconds by step since the start of this process at `task["began"]`, by the system's clock."""
    from triforce.interface.sampling_params import SamplingParams
    from triforce.llm import LLM

    import_end = time()
    settings = {name: task[name] for name in ("mode", "device", "dtype", "kv_dtype", "weight_inputs")}
    llm = LLM(task["model"], task["draft"], **settings)
    load_end = time()
    prefill_end = 0.0

    def on_prefill(done: int, total: int) -> None:
        nonlocal prefill_end
        prefill_end = time()

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for _ in llm.stream(task["prompt"], params, load_cache=task["load_cache"], on_prefill=on_prefill):
        break
    end = time()
    prefill_end = prefill_end or load_end
    return {
        "imports": import_end - task["began"],
        "weights": llm.load_seconds,
        "engine": load_end - import_end - llm.load_seconds,
        "prompt": prefill_end - load_end,
        "first token": end - prefill_end,
        "end": end,
    }


if __name__ == "__main__":
    try:
        print(json.dumps(first_token(json.loads(sys.argv[1]))))
    except TriforceError as error:
        print(json.dumps({"error": str(error)}))
