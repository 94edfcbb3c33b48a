"""Texts of the shipped pair from one process, or from ranks that share it; prints their token ids as JSON.

Run as: python many_texts.py PROMPTS TOKENS KV_MEMORY MODES RANK COUNT MEETING. One process is rank 0 of 1. KV_MEMORY
`all` keeps all KV in memory; a size keeps as much there and the rest in files. MODES are separated by commas.
"""

from __future__ import annotations

import json
import sys
from importlib import resources
from itertools import product

from triforce.distributed.group import ALONE, TPGroup
from triforce.distributed.socket_group import SocketGroup
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

LENGTH = 600  # tokens of a prompt, more than twice the budget


def main(prompts: int, tokens: int, kv_memory: str, modes: str, rank: int, count: int, meeting: str) -> None:
    ranks: TPGroup = SocketGroup(rank, count, meeting, patience=250) if count > 1 else ALONE
    offload = {} if kv_memory == "all" else {"kv_offload": "file", "kv_memory": kv_memory}
    llm = LLM(retrieval_budget=256, ranks=ranks, **offload)
    assert llm.tokenizer
    book = (resources.files("triforce") / "assets" / "dracula.txt").read_text(encoding="utf-8")
    ids = llm.tokenizer.encode(book[: prompts * LENGTH * 8])
    cuts = [ids[start : start + LENGTH] for start in range(0, prompts * LENGTH, LENGTH)]
    texts = {}
    for mode, temperature in product(modes.split(","), (0, 0.8)):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate(cuts, params, mode=mode)
        assert all(output.exactness == "bitwise" for output in outputs)
        texts[f"{mode} {temperature}"] = [output.outputs[0].token_ids for output in outputs]
    print(json.dumps(texts))
    if isinstance(ranks, SocketGroup):
        ranks.leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], int(sys.argv[5]), int(sys.argv[6]), sys.argv[7])
