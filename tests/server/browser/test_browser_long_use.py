"""Long use of the page in Chromium: 200 turns with the memory of the first ones, and ten about a long document."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.helpers.gguf_files import SMOLLM2
from tests.helpers.page_browser import (
    WAIT,
    answer_with,
    drop,
    expect,
    finish,
    hold_streams,
    piece,
    send,
    set_settings,
    unlock,
    usage,
)
from tests.helpers.server_process import ROOT, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page

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


TURNS = 10
DOCUMENT_CHARACTERS = 24_500  # about 6,000 tokens


@pytest.mark.slow
def test_browser_later_turns_read_little(browser: Browser) -> None:
    """Ten questions about a document of 6,000 tokens, with a reload in the middle of the fifth answer.

    A later question reads less than a fifth of the tokens that the first one read: its first token comes that early.
    """
    if not SMOLLM2.exists():
        pytest.skip("there is no file of smollm2; fetch it with `make smollm2`")
    text = (ROOT / "src" / "triforce" / "assets" / "dracula.txt").read_text()[:DOCUMENT_CHARACTERS]
    with serving(str(SMOLLM2)) as (_, url):
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        unlock(page, context="8,192")
        set_settings(page, max_tokens="32", temperature="0")
        drop(page, {"dracula.txt": text})
        expect(page.locator(".composer .documents li")).to_have_count(1)
        read_counts = []
        for turn in range(TURNS):
            if turn == TURNS // 2:
                hold_streams(page, 6)
            send(page, f"Question {turn}: what is written about the journey?")
            if turn == TURNS // 2:
                expect(page.locator(".answer").last.locator(".figures")).to_be_visible()
                page.wait_for_timeout(700)  # the answer is kept every half second
                page.once("dialog", lambda dialog: dialog.accept())
                page.reload()
                expect(page.locator(".ending").last).to_contain_text("The answer was interrupted")
                page.get_by_role("button", name="Go on").click()
            answer = page.locator(".answer").nth(turn)
            expect(answer.get_by_role("button", name="Regenerate")).to_be_enabled(timeout=5 * WAIT)
            figures = answer.locator(".figures").inner_text()
            counts = [
                int(count.replace(",", "")) for count in re.findall(r"([\d,]+)(?= of| tokens? (?:of|read))", figures)
            ]
            read_counts.append(counts[-1] - (counts[0] if len(counts) > 1 else 0))
        context.close()
    assert read_counts[0] > 5000 and max(read_counts[1:]) < read_counts[0] / 5
