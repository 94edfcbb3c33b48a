"""Writes happen behind the answers: bounded, in order, and never a reason for an answer to fail."""

from __future__ import annotations

import errno
import threading

import pytest

from triforce.disk_cache.write_queue import WriteQueue


def test_queue_is_bounded_but_takes_one_of_any_size() -> None:
    queue, gate, done = WriteQueue(max_bytes=100), threading.Event(), list[int]()
    assert queue.offer(lambda: gate.wait() and None, 1000)
    assert not queue.offer(lambda: done.append(1), 1) and not queue.has_room(1)
    gate.set()
    assert queue.flush()
    for i in range(5):
        assert queue.offer(lambda i=i: done.append(i), 20)  # type: ignore[misc]
    assert queue.flush() and done == [0, 1, 2, 3, 4]
    queue.close()


def test_close_writes_what_is_queued_and_takes_no_more() -> None:
    queue, done = WriteQueue(), list[int]()
    for i in range(3):
        queue.offer(lambda i=i: done.append(i), 1)  # type: ignore[misc]
    queue.close()
    assert done == [0, 1, 2]
    assert not queue.offer(lambda: None, 1) and not queue.wait()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("a mistake of ours")])
def test_failed_write_costs_what_is_queued_and_one_line(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    queue, gate, done = WriteQueue(), threading.Event(), list[int]()

    def fail() -> None:
        gate.wait()
        raise error

    queue.offer(fail, 1)
    queue.offer(lambda: done.append(1), 1)
    queue.offer(lambda: done.append(2), 1)
    gate.set()
    assert queue.flush() and queue.failures == 1 and done == []
    assert len(caplog.records) == 1 and "3 entries" in caplog.text and str(error) in caplog.text
    assert queue.offer(lambda: done.append(3), 1) and queue.flush() and done == [3]
    queue.close()


def test_rate_makes_writes_wait() -> None:
    """A slow rate holds the second write back until the queue is closed, and no longer."""
    queue, done = WriteQueue(rate=1e-3), list[int]()
    queue.offer(lambda: done.append(1), 100)
    assert queue.flush()
    queue.offer(lambda: done.append(2), 100)
    assert not queue.flush(seconds=0.05) and done == [1]
    queue.close(seconds=0.05)
    assert queue.flush() and done == [1, 2]
