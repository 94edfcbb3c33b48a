"""One of several processes that test `TorchGroup`; prints the successes, and the error at the end.

Run as: python one_rank.py RANK COUNT FOLDER END, where END is the fault of the last rank: `die`, `hang`, `differ`, or
`part`: it skips a broadcast.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from triforce.distributed.group import span
from triforce.distributed.torch_group import TorchGroup
from triforce.errors import RankError


def main(rank: int, count: int, folder: str, end: str) -> None:
    patience = 2 if end == "hang" else 60
    ranks = TorchGroup(rank, count, f"file://{Path(folder) / 'meeting'}", cuda=False, patience=patience)
    ranks.barrier()
    for dtype in (torch.bfloat16, torch.float32):
        for width in (count, 7, 48):
            full = torch.randn(5, width, generator=torch.Generator().manual_seed(width)).to(dtype)
            shard = full[:, span(width, ranks)]
            assert torch.equal(ranks.gather(shard, width), full), (dtype, width)
            parts = [torch.full_like(full, r + 1) for r in range(count)]
            assert torch.equal(ranks.add(parts[rank]), sum(parts[1:], parts[0]))
    for length in (1, 900, 1100, 70_000):
        assert ranks.broadcast(("from", rank, "x" * length)) == ("from", 0, "x" * length)
    assert ranks.all_true(True) and not ranks.all_true(rank == 0)
    ranks.compare(7, "the sevens")
    print("all right", flush=True)
    is_last = rank == count - 1
    if is_last and end == "die":
        os._exit(9)
    if is_last and end == "hang":
        time.sleep(600)
    try:
        if end == "part" and not is_last:
            ranks.broadcast("one of several")
        if end == "part":
            ranks.all_true(True)
        ranks.compare(7 + is_last if end == "differ" else 7, "the sevens")
    except RankError as error:
        print(error, flush=True)
    ranks.leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
