"""SocketGroup: arrays and values of all ranks, over real sockets. Most ranks here are threads of the test's process."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.helpers.socket_ranks import free_port, run_ranks
from triforce.arrays import float32, rounded
from triforce.distributed.group import span
from triforce.distributed.rank_link import RankLink
from triforce.distributed.socket_group import SocketGroup
from triforce.errors import RankError

PATIENCE = 0.3
TYPES = [np.float32, np.float16, np.uint16, np.int8, np.bool_]


@pytest.fixture(params=["file", "tcp"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (tmp_path / "meeting").as_uri() if request.param == "file" else f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def folder_url(tmp_path: Path) -> str:
    return (tmp_path / "meeting").as_uri()


def numbers(rows: int, width: int, dtype: Any, seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).integers(0, 200, (rows, width)).astype(dtype)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_gathered_arrays_equal_whole_ones(url: str, count: int) -> None:
    """Of all types and few rows. A width that the ranks do not divide gives unequal spans, some of them empty."""
    wholes = [
        numbers(rows, width, dtype) for dtype in TYPES for rows in (0, 1, 5) for width in (1, count, 7, 48)
    ]  # fmt: skip

    def run(group: SocketGroup) -> list[NDArray[Any]]:
        return [group.gather(joined[:, span(joined.shape[1], group)], joined.shape[1]) for joined in wholes]

    for results in run_ranks(count, url, run):
        assert not isinstance(results, Exception), results
        for gathered, joined in zip(results, wholes, strict=True):
            assert gathered.dtype == joined.dtype and np.array_equal(gathered, joined)
            assert gathered.flags.writeable and gathered.flags.c_contiguous


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sum_has_bits_of_float32_in_rank_order(folder_url: str, dtype: str) -> None:
    """Other orders have other bits here, and so have sums that are rounded after each addition."""
    parts = [rounded(numbers(3, 64, np.float32, seed) ** 3 / 7, dtype) for seed in range(3)]
    error_0, error_1, third = map(float32, parts)
    expected = rounded(error_0 + error_1 + third, dtype)
    if dtype == "float32":
        assert not np.array_equal(expected, error_0 + (error_1 + third))
    else:
        stepwise = rounded(float32(rounded(error_0 + error_1, dtype)) + third, dtype)
        assert not np.array_equal(expected, stepwise)
    originals = [part.copy() for part in parts]
    for total in run_ranks(3, folder_url, lambda group: group.add(parts[group.rank])):
        assert isinstance(total, np.ndarray), total
        assert total.dtype == expected.dtype and np.array_equal(total, expected)
    assert all(np.array_equal(part, original) for part, original in zip(parts, originals, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_tensors_come_back_as_tensors(folder_url: str, dtype: torch.dtype) -> None:
    joined = torch.arange(5 * 7).reshape(5, 7).to(dtype)

    def run(group: SocketGroup) -> tuple[torch.Tensor, torch.Tensor]:
        return group.gather(joined[:, span(7, group)], 7), group.add(joined)

    for result in run_ranks(2, folder_url, run):
        assert not isinstance(result, Exception), result
        gathered, total = result
        assert gathered.dtype == total.dtype == dtype
        assert torch.equal(gathered, joined) and torch.equal(total, 2 * joined)
        total += 1  # a kernel may write to it


@pytest.mark.timeout(120)
def test_large_arrays_are_exchanged_while_all_send(url: str) -> None:
    """Each rank sends 24 MB to each other rank, more than a socket buffers: all ranks read while they send."""
    joined = numbers(2, 3 * 2**20 + 1, np.float32)

    def run(group: SocketGroup) -> bool:
        gathered = group.gather(joined[:, span(joined.shape[1], group)], joined.shape[1])
        return np.array_equal(gathered, joined) and np.array_equal(group.add(joined), 3 * joined)

    assert run_ranks(3, url, run) == [True, True, True]


def test_slow_rank_receives_large_array_in_pieces(folder_url: str) -> None:
    """Patience is that of silence: a joined message may take longer."""
    joined = np.ones((1, 2**22), np.float32)
    link_of_slow_rank: list[RankLink] = []
    receive_some = RankLink._receive_some

    def slowly(link: RankLink) -> None:
        if link in link_of_slow_rank:
            time.sleep(PATIENCE / 20)
        receive_some(link)

    def run(group: SocketGroup) -> float:
        if group.rank:
            link_of_slow_rank.append(group._links[0])
        began = time.monotonic()
        group.gather(joined[:, span(2**22, group)], 2**22)
        return time.monotonic() - began

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankLink, "_receive_some", slowly)
        seconds = run_ranks(2, folder_url, run, PATIENCE)
    assert isinstance(seconds[1], float) and seconds[1] > PATIENCE, seconds


def test_rank_that_is_late_in_a_pass_ends_both(folder_url: str) -> None:
    def run(group: SocketGroup) -> None:
        if group.rank:
            time.sleep(4 * PATIENCE)
        group.gather(np.ones((1, 4), np.float32), 8)

    error_0, error_1 = run_ranks(2, folder_url, run, PATIENCE)
    assert isinstance(error_0, RankError) and f"did not answer for {PATIENCE} seconds (rank 1 is silent)" in str(
        error_0
    )
    assert isinstance(error_1, RankError) and "rank 0" in str(error_1)


def test_rank_that_is_late_between_passes_is_waited_for(folder_url: str) -> None:
    """The waiting rank takes no processor time."""

    def run(group: SocketGroup) -> float:
        began = time.thread_time()
        for wait in (lambda: group.broadcast(7), lambda: group.all_true(True), group.barrier):
            if not group.rank:
                time.sleep(2 * PATIENCE)
            wait()
        return time.thread_time() - began

    seconds = run_ranks(2, folder_url, run, PATIENCE)
    assert all(isinstance(taken, float) and taken < PATIENCE / 3 for taken in seconds), seconds


def test_message_that_breaks_off_ends_gather(folder_url: str) -> None:
    """After an error the group stays unusable, and does not read from the middle of a message."""

    def run(group: SocketGroup) -> None:
        part = np.ones((1, 1000), np.float32)
        if group.rank:
            header = group._header("gather", 4000)._replace(exchanges=1).pack()
            group._links[0].send(header, bytes(2000))
            group._links[0].advance()
            return
        try:
            group.gather(part, 2000)
        finally:
            with pytest.raises(RankError, match="another rank has ended"):
                group.barrier()

    error, nothing = run_ranks(2, folder_url, run)
    assert nothing is None
    assert isinstance(error, RankError) and "another rank has ended" in str(error) and "rank 1" in str(error)


def diverging(group: SocketGroup, difference: str) -> None:
    rows = 2 if group.rank and difference == "rows" else 1
    if group.rank and difference == "operation":
        group.barrier()
    if group.rank and difference == "additional":
        group.compare(1, "the ones")
    if not group.rank and difference == "broadcast":
        group.broadcast("unread")
    group.gather(np.ones((rows, 4), np.float32), 8)
    group.barrier()


@pytest.mark.parametrize("difference", ["rows", "operation", "additional", "broadcast"])
def test_diverged_ranks_end_with_an_error(folder_url: str, difference: str) -> None:
    """They neither wait for each other nor go on with foreign numbers."""
    for error in run_ranks(2, folder_url, lambda group: diverging(group, difference)):
        assert isinstance(error, RankError) and "ranks have diverged: one rank has made" in str(error)


def test_broadcast_waits_for_nobody(folder_url: str) -> None:
    """Rank 0 goes on at once; the other ranks find its values in order."""
    sent = threading.Event()

    def run(group: SocketGroup) -> list[Any]:
        if group.rank:
            assert sent.wait(30)
        values = [group.broadcast(value) for value in ([1, 2], {"a": (None, 0.5)}, "x" * 10_000)]
        sent.set()
        return values

    results = run_ranks(3, folder_url, run)
    assert results == [[[1, 2], {"a": (None, 0.5)}, "x" * 10_000]] * 3
