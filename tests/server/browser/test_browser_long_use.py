"""Long use of the page in Chromium: 200 turns take the memory and the number of elements of the first turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.helpers.page_browser import answer_with, expect, finish, piece, send, usage

if TYPE_CHECKING:
    from playwright.sync_api import CDPSession, Page

FIRST, LAST = 12, 200  # turns
ANSWER = "Some **bold** text with `code`, and a list:\n\n- one\n- two\n\n```python\nx = 1\n```\n" * 3


def heap(session: CDPSession) -> int:
    """Return the bytes that JavaScript uses after a collection."""
    session.send("HeapProfiler.collectGarbage")
    return int(session.send("Runtime.getHeapUsage")["usedSize"])


def test_browser_long_conversation_keeps_its_memory(page: Page) -> None:
    session = page.context.new_cdp_session(page)
    answer_with(page, [piece(ANSWER, tier="retrieval", seen=list(range(100)) * 2), finish(), usage(400)])
    sizes: dict[int, tuple[int, int]] = {}
    for turn in range(1, LAST + 1):
        send(page, f"question {turn}")
        expect(page.locator(".question .plain").last).to_have_text(f"question {turn}")
        expect(page.locator(".answer").last.get_by_role("button", name="Regenerate")).to_be_enabled()
        if turn in (FIRST, LAST):
            sizes[turn] = heap(session), page.evaluate("document.querySelectorAll('*').length")
    (first_heap, first_elements), (last_heap, last_elements) = sizes[FIRST], sizes[LAST]
    assert last_elements <= 1.2 * first_elements
    assert last_heap <= 1.2 * first_heap
