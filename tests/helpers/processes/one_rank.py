"""One of several processes that test `SocketGroup`; prints the successes, and the error at the end.

Run as: python one_rank.py RANK COUNT MEETING END, where END is the fault of the last rank: `die`, `die-in-gather`,
`hang`, `differ`, or `part`: it skips a broadcast.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triforce.distributed.group import span
from triforce.distributed.socket_group import SocketGroup
from triforce.errors import RankError

LARGE = 1 << 24  # numbers of an array that no socket buffers as a whole


def arrays(width: int) -> list[NDArray[Any]]:
    """Return the same arrays of several types in each process."""
    numbers = np.random.default_rng(width).standard_normal((5, width)).astype(np.float32)
    return [numbers, numbers[:1], numbers[:0], (100 * numbers).astype(np.int8), (100 * numbers).astype(np.uint16)]


def main(rank: int, count: int, meeting: str, end: str) -> None:
    patience = 2 if end == "hang" else 60
    ranks = SocketGroup(rank, count, meeting, patience=patience)
    ranks.barrier()
    for width in (count, 7, 48):
        for whole in arrays(width):
            gathered = ranks.gather(whole[:, span(width, ranks)], width)
            assert gathered.dtype == whole.dtype and np.array_equal(gathered, whole), (whole.dtype, width)
        ones = np.ones((5, width), np.float32)
        assert np.array_equal(ranks.add((rank + 1) * ones), count * (count + 1) / 2 * ones)
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
        if end == "die-in-gather":
            if is_last:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                time.sleep(1)
            ranks.gather(np.ones((1, LARGE), np.float32), count * LARGE)
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
