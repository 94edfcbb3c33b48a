"""Controls of the playground in Chromium: keyboard, questions, files, mistakes, and the key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.server_process import KEY

if TYPE_CHECKING:
    from playwright.sync_api import Page

from tests.helpers.playground_page import DOCUMENT, compare, expect, headline


def test_browser_keyboard_alone_suffices(page: Page) -> None:
    page.locator("summary").click()
    page.get_by_role("button", name="Open a file").focus()
    visited = []
    for _ in range(12):
        page.keyboard.press("Tab")
        visited.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", visited[-1]
        if visited[-1] == "SUMMARY":
            page.keyboard.press("Enter")
        if visited[-1] == "compare":
            break
    advanced = ["SUMMARY", "tokens", "temperature", "seed", "mode", "compare"]
    assert visited == ["BUTTON", "document", "question", "run", *advanced]
    page.get_by_label("Ask about it").focus()
    page.keyboard.press("Enter")
    headline(page, "the same text$")


def test_browser_question_is_answered(page: Page) -> None:
    page.get_by_label("Document", exact=True).fill("the cat sat")
    page.get_by_label("Ask about it").fill("what did it do")
    page.get_by_label("Compare with plain decoding").uncheck()
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Run").click()
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "the cat sat\n\nwhat did it do"}]
    expect(page.locator("#going")).not_to_be_visible()
    assert page.locator("#tiered").text_content() and not page.locator("#beside").is_visible()


def test_browser_base_model_has_no_question(page: Page) -> None:
    def base(route: Any) -> None:
        card = route.fetch().json()
        card["data"][0]["triforce"]["chats"] = False
        route.fulfill(json=card)

    page.route("**/v1/models", base)
    page.get_by_label("Ask about it").fill("what did it do")
    page.evaluate("loadModel()")
    expect(page.locator("#continuing")).to_be_visible()
    assert not page.locator("#asking").is_visible()
    with page.expect_request("**/v1/completions") as asked:
        compare(page)
    assert asked.value.post_data_json["prompt"] == DOCUMENT
    headline(page, "the same text$")


def test_browser_stop_ends_generation(page: Page) -> None:
    """The button Stop ends a request that is never answered."""
    page.route("**/v1/completions", lambda route: None)
    compare(page)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#facts")).to_have_text("Stopped.")
    assert page.get_by_role("button", name="Compare").is_enabled()


def test_browser_file_is_dropped_or_opened(page: Page, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("the cat of a file")
    page.locator("#file").set_input_files(tmp_path / "book.txt")
    expect(page.get_by_label("Document", exact=True)).to_have_value("the cat of a file")
    page.evaluate(
        """() => {
            const carried = new DataTransfer();
            carried.items.add(new File(["the dropped cat"], "cat.txt"));
            const how = {dataTransfer: carried, bubbles: true, cancelable: true};
            document.getElementById("document").dispatchEvent(new DragEvent("drop", how));
        }"""
    )
    expect(page.get_by_label("Document", exact=True)).to_have_value("the dropped cat")


def test_browser_refusal_is_shown(page: Page) -> None:
    page.get_by_label("Document", exact=True).fill("")
    compare(page)
    expect(page.get_by_role("alert")).to_contain_text("prompt")
    page.route("**/v1/completions", lambda route: route.abort())
    compare(page)
    expect(page.get_by_role("alert")).to_have_text("The server does not answer. Is it still running?")
    page.unroute("**/v1/completions")
    page.get_by_label("Key of this server").fill("another-key-that-is-wrong")
    page.keyboard.press("Tab")
    expect(page.get_by_role("alert")).to_contain_text("this key is not known")
    assert page.locator("#keyed").is_visible() and not page.locator("#result").is_visible()


def test_browser_bad_advanced_setting_is_shown(page: Page) -> None:
    page.get_by_label("Tokens at most").fill("")
    page.locator("summary").click()
    assert not page.get_by_label("Tokens at most").is_visible()
    compare(page)
    assert page.get_by_label("Tokens at most").is_visible() and not page.locator("#result").is_visible()


def test_browser_key_is_not_stored(page: Page, url: str) -> None:
    stores = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
    assert KEY not in stores
    page.reload()
    expect(page.get_by_label("Key of this server")).to_have_value("")
