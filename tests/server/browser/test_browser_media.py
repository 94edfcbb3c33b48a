"""The page in Chromium for all eyes: axe-core, widths, colour schemes, forced colours, print, and no JavaScript."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.page_browser import answer_with, ask, check, close_dialog, drop, expect, finish, piece, usage

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ANSWER = """Some text with `code`, a [link](https://example.org) and $x^2$.

| a | b |
|---|---|
| 1 | 2 |

```python
def long_function_name(argument): return "a string that is long " + argument + " and longer still than that is"
```
"""


def conversation(page: Page) -> None:
    """Make a conversation that has all parts of an answer: thoughts, code, tables, a proof, tiers and a map."""
    thinking = piece("", delta={"reasoning_content": "hm"}, ids=[1])
    answer_with(page, [thinking, piece("thought over"), finish(), usage(20)])
    drop(page, {"book.txt": "the cat sat on the mat"})
    expect(page.locator(".composer .documents li")).to_have_count(1)
    ask(page, "a question")
    half = len(ANSWER) // 2
    parts = (ANSWER[:half], "retrieval"), (ANSWER[half:], "ngram")
    runs = [piece(text, tier=tier, seen=[0, 30, 100]) for text, tier in parts]
    answer_with(page, [*runs, finish(), usage(9000, cached=100)])
    answer = ask(page, "another")
    check(answer)
    for summary in page.locator(".answer summary").all():
        summary.click()
    expect(answer.locator(".map")).to_be_visible()


def violations(page: Page) -> list[str]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found: Any = axe.Axe().run(page).response["violations"]
    return [f"{fault['id']}: {node['html'][:200]}" for fault in found for node in fault["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_browser_axe_finds_no_violation(page: Page, scheme: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    assert violations(page) == []
    conversation(page)
    assert violations(page) == []
    for name in ("Settings", "Runs"):
        page.get_by_role("button", name=name).click()
        assert violations(page) == []
        close_dialog(page)
    page.locator(".question").first.get_by_role("button", name="book.txt").click()
    assert violations(page) == []
    close_dialog(page)
    if width == 320:
        page.get_by_role("button", name="Conversations").click()
        assert violations(page) == []


def test_browser_axe_finds_no_violation_when_locked(locked_page: Page) -> None:
    expect(locked_page.get_by_label("Key of this server")).to_be_visible()
    assert violations(locked_page) == []


@pytest.mark.parametrize("width", [320, 390, 768, 1280, 3440])
def test_browser_layout_fits_all_widths(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    conversation(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("Settings", "Runs"):
        page.get_by_role("button", name=name).click()
        box = page.get_by_role("dialog").bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= width
        close_dialog(page)
    if width < 400:
        small = "all => all.filter(e => e.offsetHeight && e.offsetHeight < 44).map(e => e.outerHTML)"
        assert page.locator("button, select, input:not([type=checkbox]), summary").evaluate_all(small) == []


def test_browser_forced_colours_keep_the_tiers(page: Page) -> None:
    page.emulate_media(forced_colors="active")
    conversation(page)
    styles = page.locator(".tiered span[title]").evaluate_all(
        "spans => [...new Set(spans.map(span => getComputedStyle(span).textDecorationStyle))]"
    )
    assert {"dashed", "dotted"} <= set(styles)
    mark = page.locator(".headline.same").evaluate("e => getComputedStyle(e, '::before').content")
    assert "✓" in mark


def test_browser_print_is_whole(page: Page) -> None:
    conversation(page)
    page.emulate_media(media="print")
    for selector in (".composer", ".side", ".answer .acts button"):
        assert not page.locator(selector).first.is_visible()
    for selector in (".tiered", "pre", ".block"):
        clipped = page.locator(selector).evaluate_all(
            "all => all.filter(e => e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1).length"
        )
        assert clipped == 0, selector
    assert len(page.pdf()) > 10_000


def test_browser_without_javascript_says_a_word(browser: Browser, url: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(url)
    assert "This page needs JavaScript." in page.locator("body").inner_text()
    context.close()


def test_browser_colours_of_tiers_are_told_apart(page: Page) -> None:
    conversation(page)
    grounds = page.locator(".tiered span[title]").evaluate_all(
        "all => all.map(e => getComputedStyle(e).backgroundColor)"
    )
    assert len(set(grounds)) == 2
    assert not re.search("dark|light", page.locator(".key").first.inner_text(), re.I)
