"""Prints as JSON this process's resident bytes above those after import, while all ranks are alive.

Run as: python rank_memory.py MODEL RANK COUNT MEETING. One process is rank 0 of 1.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch

from triforce.distributed.group import ALONE, TPGroup
from triforce.distributed.socket_group import SocketGroup
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM


def resident(kind: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024


def main(model: str, rank: int, count: int, meeting: str) -> None:
    torch.ones(64, 64) @ torch.ones(64, 64)
    ranks: TPGroup = SocketGroup(rank, count, meeting) if count > 1 else ALONE
    resident_before = resident()
    llm = LLM(model, None, mode="ar", ranks=ranks)
    prompt = torch.arange(600).tolist()
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
    gc.collect()
    ranks.barrier()
    grown = resident() - resident_before
    ranks.barrier()
    print(json.dumps({"grown": grown, "tokens": output.outputs[0].token_ids}))
    if isinstance(ranks, SocketGroup):
        ranks.leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
