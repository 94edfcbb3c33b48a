"""The proof beside an answer in Chromium: verdicts, reasons, prices, and the table of runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.page_browser import (
    CHATS,
    answer_with,
    ask,
    change_card,
    check,
    close_dialog,
    expect,
    finish,
    piece,
    set_settings,
    usage,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

TEXT = "twenty tokens of text"
QUESTION = "the cat sat on the mat " * 40


def test_browser_answer_of_all_tiers_is_identical(page: Page) -> None:
    set_settings(page, max_tokens="60", temperature="1", seed="5")
    answer = ask(page, QUESTION)
    expect(answer.locator(".price")).to_contain_text("generates it again plainly, in at most about")
    check(answer)
    expect(answer.locator(".headline")).to_have_text(re.compile("^Identical to plain decoding"))
    answer.get_by_text("How it was made").click()
    expect(answer.locator(".tiered")).to_be_visible()
    tiers = answer.locator("table th[scope=row]").all_inner_texts()
    assert tiers[-1] == "full" and set(tiers) <= {"draft", "retrieval", "full"}
    counts = [int(text) for text in answer.locator("table td:nth-child(2)").all_inner_texts()]
    expect(answer.locator(".figures")).to_contain_text(f"{sum(counts)} tokens")
    shown = answer.locator(".tiered").inner_text()
    assert shown.split() == answer.locator(".markdown").inner_text().split()


@pytest.mark.parametrize(
    ("seconds", "tokens", "tier", "headline", "why"),
    [
        (0.5, 9000, "retrieval", "Identical to plain decoding, 4.0 times as fast", ""),
        (1.9, 9000, "retrieval", "Identical to plain decoding", "the proposals took as much time"),
        (
            2.0,
            500,
            "retrieval",
            "Identical to plain decoding",
            "a conversation of 500 tokens is short",
        ),
        (
            1.0,
            9000,
            "full",
            "Identical to plain decoding",
            "does not pay for this text",
        ),
        (
            1.0,
            500,
            "full",
            "Identical to plain decoding",
            "difference in speed is chance",
        ),
    ],
)
def test_browser_headline_equals_measurement(
    page: Page, seconds: float, tokens: int, tier: str, headline: str, why: str
) -> None:
    change_card(page, pays_from=4000, pays="Speculation pays from 4,000 tokens on.")
    slow = [piece(TEXT, seconds=2.0), finish(), usage(tokens)]
    answer_with(page, [piece(TEXT, seconds=seconds, tier=tier), finish(), usage(tokens)], slow)
    answer = ask(page, "the cat")
    check(answer)
    expect(answer.locator(".headline")).to_have_text(headline)
    reason = answer.locator(".verdict .soft")
    expect(reason).to_have_count(1 if why else 0)
    if why:
        expect(reason).to_contain_text(why)


def test_browser_server_without_gain_is_told_before_and_after(page: Page) -> None:
    change_card(page, pays_from=None, pays="Speculation should not pay: KV is small.")
    expect(page.locator("#pays")).to_have_text("Speculation should not pay: KV is small.")
    page.locator("#composer").fill("the cat")
    expect(page.locator("#room")).to_contain_text("Speculation gains no speed here.")
    answer_with(page, [piece(TEXT, tier="retrieval"), finish(), usage(500)])
    answer = ask(page, "the cat")
    check(answer)
    expect(answer.locator(".verdict .soft")).to_have_text("Why not faster? Speculation should not pay: KV is small.")


def test_browser_gain_is_told_before_the_click(page: Page) -> None:
    change_card(page, pays_from=300, pays="Speculation pays from 300 tokens on.")
    page.locator("#composer").fill("short")
    expect(page.locator("#room")).to_contain_text("Too short to gain speed: that begins at 300.")
    page.locator("#composer").fill("long text " * 150)
    expect(page.locator("#room")).to_contain_text("Long enough to gain speed.")


@pytest.mark.parametrize(("share", "loops"), [(0.09, False), (0.1, True), (0.38, True)])
def test_browser_loop_is_not_celebrated(page: Page, share: float, loops: bool) -> None:
    """A text that repeats itself is not shown as a gain, however fast it came."""
    events = [piece(TEXT, tier="ngram"), finish(), usage(9000, repeated=share)]
    answer_with(page, events, [piece(TEXT, seconds=2.0), finish(), usage(9000, repeated=share)])
    answer = ask(page, "the cat")
    check(answer)
    speed = "but it repeats itself" if loops else "2.0 times as fast"
    expect(answer.locator(".headline")).to_have_text(f"Identical to plain decoding, {speed}")
    if loops:
        expect(answer.locator(".verdict .soft")).to_contain_text(
            f"repeats itself ({100 * share:.0f} % of its runs of eight tokens)"
        )


def test_browser_difference_is_shown_in_red(page: Page) -> None:
    """Tokens are compared, not letters: equal texts of other tokens differ."""
    other_events = [piece(TEXT, ids=[*map(ord, TEXT[:5]), *range(16)]), finish(), usage(500)]
    answer_with(page, [piece(TEXT), finish(), usage(500)], other_events)
    answer = ask(page, "the cat")
    check(answer)
    headline = answer.locator(".headline")
    expect(headline).to_have_text("Differs from plain decoding at token 6")
    assert "other" in (headline.get_attribute("class") or "")
    answer.get_by_text("Text of plain decoding").click()
    expect(answer.locator(".verdict .plain")).to_have_text(TEXT)


def test_browser_longer_plain_text_differs(page: Page) -> None:
    answer_with(page, [piece(TEXT), finish(), usage(500)], [piece(TEXT + "!"), finish(), usage(500)])
    answer = ask(page, "the cat")
    check(answer)
    expect(answer.locator(".headline")).to_have_text(f"Differs from plain decoding at token {len(TEXT) + 1}")


def test_browser_few_tokens_show_no_speed(page: Page) -> None:
    answer_with(page, [piece("few"), finish(), usage(9000)])
    answer = ask(page, "the cat")
    check(answer)
    expect(answer.locator(".headline")).to_have_text("Identical to plain decoding")
    expect(answer.locator(".verdict")).to_contain_text("These are too few tokens to measure a speed.")


@pytest.mark.parametrize(
    ("changes", "capabilities", "reason"),
    [
        ({"id": "another-model"}, {}, "The model or the server changed since this answer was made"),
        ({}, {"system_fingerprint": "fp_other"}, "The model or the server changed since this answer was made"),
        ({}, {"coupling": "block"}, "This server's coupling is block"),
    ],
)
def test_browser_changed_server_is_never_red(
    page: Page, changes: dict[str, Any], capabilities: dict[str, Any], reason: str
) -> None:
    set_settings(page, temperature="1")
    answer = ask(page, "the cat")
    change_card(page, changes, **capabilities)
    expect(answer.locator(".price")).to_contain_text(reason)
    expect(answer.get_by_role("button", name="Check against plain decoding")).to_be_disabled()
    assert answer.locator(".other").count() == 0


def test_browser_server_that_changes_during_a_check_is_never_red(page: Page) -> None:
    answer_with(page, [piece(TEXT), finish(), usage(500)])
    answer = ask(page, "the cat")
    body = json.dumps({"model": "target", "system_fingerprint": "fp_new"} | piece("other"))
    page.unroute(CHATS)
    page.route(CHATS, lambda route: route.fulfill(body=f"data: {body}\n\n", content_type="text/event-stream"))
    check(answer)
    expect(answer.locator(".headline")).to_have_text("Not checked")
    assert answer.locator(".other").count() == 0


def test_browser_other_prompt_tokens_are_never_red(page: Page) -> None:
    answer_with(page, [piece(TEXT), finish(), usage(500)])
    answer = ask(page, "the cat")
    moved = {"choices": [], "prompt_token_ids": [1, 2, 4]}
    answer_with(page, [moved, piece("something else"), finish(), usage(500)])
    check(answer)
    expect(answer.locator(".verdict")).to_contain_text("now reads this conversation as other tokens")


def test_browser_check_is_stopped(page: Page) -> None:
    answer_with(page, [piece(TEXT), finish(), usage(500)])
    answer = ask(page, "the cat")
    page.unroute(CHATS)
    page.route(CHATS, lambda route: None)
    answer.get_by_role("button", name="Check against plain decoding").click()
    expect(answer.locator(".going")).to_contain_text("Plain decoding")
    page.keyboard.press("Escape")
    expect(answer.get_by_role("button", name="Check against plain decoding")).to_be_enabled()
    expect(answer.locator(".verdict")).to_have_count(0)


def test_browser_verdict_outlasts_a_reload(page: Page) -> None:
    answer = ask(page, "the cat sat on the mat")
    check(answer)
    headline = answer.locator(".headline").inner_text()
    page.reload()
    expect(page.locator(".headline")).to_have_text(headline)


def test_browser_plain_decoding_needs_no_check(page: Page) -> None:
    set_settings(page, mode="ar")
    answer = ask(page, "the cat")
    expect(answer.locator(".price")).to_contain_text("This answer is plain decoding itself.")


def test_browser_time_left_is_shown_while_reading(page: Page) -> None:
    """The time left follows the page's own clock, in a stream that goes on until it is stopped."""
    page.evaluate(
        """() => {
            const real = window.fetch;
            let now = 0;
            performance.now = () => now;
            const frame = tokens => { now += 1000; return "data: " + JSON.stringify(
                {choices: [], prompt_progress: {processed: tokens, total: 10000}}) + "\\n\\n"; };
            const counts = [1000, 2000, 3000];
            window.fetch = async (address, options) => {
                if (!String(address).endsWith("completions")) return real(address, options);
                const pull = async control => {
                    const tokens = counts.shift();
                    if (tokens) return control.enqueue(new TextEncoder().encode(frame(tokens)));
                    await new Promise((_, reject) =>
                        options.signal.addEventListener("abort", () => reject(new DOMException("", "AbortError"))));
                };
                return new Response(new ReadableStream({pull}, {highWaterMark: 0}));
            };
        }"""
    )
    page.locator("#composer").fill("the cat")
    page.keyboard.press("Enter")
    going = page.locator(".going")
    expect(going.get_by_role("status")).to_have_text("Reading the conversation")
    expect(going).to_contain_text("3,000 of 10,000 tokens, about 7.0 s left")
    assert going.locator("progress").evaluate("bar => bar.value") == 0.3
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".ending")).to_have_text("You stopped this answer.")


@pytest.mark.parametrize(
    ("seen", "message"),
    [([], "was not used"), ([100, 100], "The retrieval tier read the whole text"), ([0, 100], "")],
)
def test_browser_map_shows_what_retrieval_read(page: Page, seen: list[int], message: str) -> None:
    answer_with(page, [piece(TEXT, seen=seen, tier="retrieval"), finish(), usage(9000)])
    answer = ask(page, "the cat")
    answer.get_by_text("How it was made").click()
    if message:
        expect(answer.locator(".details")).to_contain_text(message)
    else:
        expect(answer.locator(".map")).to_have_attribute("aria-label", re.compile("see 50 % of 9,021 tokens"))
        pixels = "map => [10, 200].map(x => map.getContext('2d').getImageData(x, 0, 1, 1).data[3])"
        assert answer.locator(".map").evaluate(pixels) == [0, 255]


def test_browser_runs_are_exported_and_linked(page: Page, tmp_path: Path) -> None:
    events = [piece(TEXT, tier="retrieval"), finish(), usage(9000, cached=8000)]
    answer_with(page, events, [piece(TEXT, seconds=2.0), finish(), usage(9000)])
    check(ask(page, "a secret question"))
    page.get_by_role("button", name="Runs").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    rows = [row.split("\t") for row in page.locator("dialog tbody tr").all_inner_texts()]
    assert rows[0][:5] == ["1", "triforce", "9,000", "8,000", "21"] and rows[0][6:9] == [
        "21",
        "20 %",
        "identical to plain decoding",
    ]
    assert rows[1][1] == "ar (check)"
    with page.expect_download() as export:
        page.get_by_role("button", name="Export as JSON").click()
    export.value.save_as(tmp_path / "runs.json")
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert [(run["mode"], run["rate"], run["verdict"]) for run in runs] == [
        ("triforce", 21, "identical"),
        ("ar", 10.5, "check"),
    ]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy a link").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    link = page.evaluate("navigator.clipboard.readText()")
    close_dialog(page)
    visitor = page.context.browser.new_page() if page.context.browser else page
    visitor.goto(link)
    expect(visitor.get_by_role("dialog")).to_be_visible()
    assert [row.split("\t") for row in visitor.locator("dialog tbody tr").all_inner_texts()] == rows
    expect(visitor.locator("dialog")).to_contain_text("this page has not verified them")
    visitor.close()


def test_browser_broken_link_of_runs_is_harmless(page: Page, url: str) -> None:
    for code in ("%%%", "e30", "W251bGxd", "W3siYW5zd2VyIjoiPGltZz4iLCJtb2RlIjp7fX1d"):
        second_tab = page.context.new_page()
        second_tab.goto(f"{url}/#runs={code}")
        expect(second_tab.get_by_role("dialog")).to_be_visible()
        second_tab.close()


def test_browser_text_of_a_file_is_not_taken_for_its_tokens(page: Page, tmp_path: Path) -> None:
    """An imported answer whose text was changed has the right tokens, and is not called identical."""
    ask(page, "the cat sat on the mat")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    data = json.loads(Path(download.value.path()).read_text())
    forged = [turn for turn in data["turns"] if turn["role"] == "assistant"]
    for changes, message in (({"text": "something else"}, "is not the text of its tokens"), ({}, "is not known here")):
        (piece_of_answer,) = forged[0]["pieces"]
        text = piece_of_answer["text"]
        forged[0]["pieces"] = [piece_of_answer | changes]
        (tmp_path / "forged.json").write_text(json.dumps(data))
        forged[0]["pieces"] = [piece_of_answer | {"text": text}]
        page.locator("#import").set_input_files(tmp_path / "forged.json")
        expect(page.locator(".side .current")).to_contain_text("(imported)")
        answer = page.locator(".answer")
        check(answer)
        expect(answer.locator(".verdict")).to_contain_text(message)
        page.get_by_role("button", name="Delete", exact=True).click()


@pytest.mark.parametrize("ids", [[], None])
def test_browser_stream_without_an_end_gives_no_verdict(page: Page, ids: list[int] | None) -> None:
    answer_with(page, [piece(TEXT), finish(), usage(500)], [piece(TEXT, ids=ids) if ids is not None else piece(TEXT)])
    answer = ask(page, "the cat")
    check(answer)
    expect(answer.locator(".headline")).to_have_text("Not checked")
