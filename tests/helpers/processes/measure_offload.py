"""Prints the memory that `triforce info` predicts for a run with offloaded KV, and its real peak, in bytes.

Run in a process of its own: python tests/helpers/processes/measure_offload.py PROMPT_TOKENS KV_MEMORY
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
from measure_memory import resident

from triforce.cli.info import offload_lines
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM


def main(tokens: int, memory: str) -> None:
    how = dict(kv_offload="file", kv_memory=memory, kv_resident_layers="auto")
    config = LLM(draft=None, context=tokens + 16).target.config
    prediction = offload_lines(config, "bfloat16", "cpu", config.parameters * 2, Namespace(**how))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    prompt = np.random.default_rng(0).integers(2, config.vocab_size, tokens).tolist()
    llm = LLM(context=tokens + 16, kv_offload="file", kv_memory=memory)
    llm.generate(prompt, SamplingParams(temperature=0.8, seed=1, max_tokens=16, ignore_eos=True))
    print(int(prediction["in memory, in all"]), resident("VmHWM"))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
