"""SharedSlots: keys take turns within their shares, and a slot is held until its work has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from triforce.server.errors import ApiError
from triforce.server.grammar_queue import SharedSlots


def slots(max_per_key: int = 9) -> SharedSlots:
    """Return shared slots with one place."""
    return SharedSlots("texts", 0.0, max_per_key)


async def begun(holder: SharedSlots, key: str, work: Callable[[], object], **how: Callable[[], None]) -> asyncio.Task:
    task = asyncio.create_task(holder.run(key, work, **how))
    await asyncio.sleep(0)
    return task


def test_slots_let_keys_take_turns() -> None:
    async def scene() -> list[str]:
        holder, order, gate = slots(), list[str](), threading.Event()
        tasks = [await begun(holder, "first", gate.wait)]
        for key in ("many", "many", "many", "other", "third"):
            tasks.append(await begun(holder, key, lambda key=key: order.append(key)))
        gate.set()
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(scene()) == ["many", "other", "third", "many", "many"]


def test_slots_share_used_up_is_429_for_its_key_only() -> None:
    async def scene() -> None:
        holder = slots(max_per_key=2)
        gate = threading.Event()
        tasks = [await begun(holder, "a", gate.wait), await begun(holder, "a", gate.wait)]
        with pytest.raises(ApiError, match=r"2 texts of this client .* try again in 5 seconds") as refusal:
            await holder.run("a", gate.wait)
        assert refusal.value.status == 429 and refusal.value.headers == {"Retry-After": "5"}
        tasks.append(await begun(holder, "b", gate.wait))
        gate.set()
        await asyncio.gather(*tasks)
        assert await holder.run("a", lambda: 5) == 5

    asyncio.run(scene())


def test_slots_cancelled_waiter_gives_way_and_worker_holds_to_the_end() -> None:
    async def scene() -> list[str]:
        holder, order, gate = slots(), list[str](), threading.Event()

        def slow() -> None:
            gate.wait()
            order.append("ended")

        running = await begun(holder, "a", slow, cancel=lambda: order.append("told"))
        await asyncio.sleep(0.05)
        waiting = await begun(holder, "a", lambda: order.append("never"))
        waiter = await begun(holder, "a", lambda: order.append("after"))
        waiting.cancel()
        running.cancel()
        await asyncio.sleep(0.05)
        assert order == ["told"] and not running.done()
        gate.set()
        await waiter
        assert running.cancelled() and waiting.cancelled()
        return order

    assert asyncio.run(scene()) == ["told", "ended", "after"]


def test_slots_error_of_work_is_raised_and_slot_given_back() -> None:
    async def scene() -> None:
        holder = slots()
        with pytest.raises(ZeroDivisionError):
            await holder.run("a", lambda: 1 / 0)
        assert await holder.run("a", lambda: 1) == 1

    asyncio.run(scene())
