"""A comparison in the playground, in Chromium: texts, speeds and what is said of them, on a screen and on a phone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.helpers.server_process import KEY

if TYPE_CHECKING:
    from playwright.sync_api import Page

from tests.helpers.playground_page import DOCUMENT, answer, card, compare, expect, headline, read, spans, told


def test_browser_first_view_has_sample_and_button(page: Page) -> None:
    page.reload()
    page.get_by_label("Key of this server").fill(KEY)
    card(page, 4000, "Speculation pays from 4,000 tokens on.")
    document = page.get_by_label("Document", exact=True)
    expect(document).to_have_value(re.compile("THE DAILYGRAPH"))
    (length,) = page.locator("#lengths button[aria-pressed=true]").all_inner_texts()
    expect(page.locator("#size")).to_contain_text("which gains little")
    (count,) = re.findall(r"^([\d,]+) tokens", page.locator("#size").inner_text())
    assert abs(int(count.replace(",", "")) / int(length.replace(",", "")) - 1) < 0.25
    assert page.get_by_role("button", name="Compare").is_visible()
    assert not page.get_by_label("Seed").is_visible() and not page.locator("#result").is_visible()
    document.press("End")
    document.press_sequentially("!")
    assert page.locator("#lengths button[aria-pressed=true]").count() == 0


def test_browser_text_is_coloured_and_equals_plain_decoding(page: Page, url: str) -> None:
    with page.expect_response("**/v1/completions") as answer:
        compare(page)
    headline(page, r"^\d+(\.\d)? times as fast, the same text$")
    text = page.locator("#tiered").text_content()
    plain = page.locator("#plain").text_content()
    body = {"prompt": DOCUMENT, "max_tokens": 40, "temperature": 0.6, "seed": 7}
    headers = {"authorization": f"Bearer {KEY}"}
    (plain_choice,) = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).json()["choices"]
    assert text == plain == plain_choice["text"]
    assert {tier for tier, _ in spans(page, "#plain")} == {"full"}
    tiers = re.findall(r'"(draft|retrieval|full)"', "".join(re.findall(r'"token_tiers": (.*?])', answer.value.text())))
    assert {tier for tier, _ in spans(page, "#tiered")} == set(tiers)
    assert [tier for tier, _ in spans(page, "#legend")] == ["draft", "retrieval", "full"]
    rows = page.locator("#tiers tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["draft", "retrieval", "full"]
    in_text = {row.split()[0]: int(row.split()[1]) for row in rows}
    assert in_text == {tier: tiers.count(tier) for tier in in_text} and len(tiers) == 40
    assert re.fullmatch(r"40 tokens, [\d.]+ per second", page.locator("#tiered-speed").inner_text())
    assert not page.locator("#going").is_visible()


@pytest.mark.parametrize(
    ("seconds", "tokens", "tier", "expected", "why"),
    [
        (1.0, 9000, "retrieval", "2.0 times as fast, the same text", "^$"),
        (2.5, 500, "retrieval", "0.8 times as fast, the same text", "the KV cache of 500 tokens is small"),
        (2.0, 9000, "retrieval", "1.0 times as fast, the same text", "100 % of the tokens were proposed correctly"),
        (1.0, 9000, "full", "As fast as plain decoding, the same text", "speculation was found not to pay.*is chance"),
        (1.0, 500, "full", "As fast as plain decoding, the same text", "the KV cache of 500 tokens.*is chance"),
    ],
)
def test_browser_headline_equals_measurement(
    page: Page, seconds: float, tokens: int, tier: str, expected: str, why: str
) -> None:
    text = "twenty tokens of text"
    card(page, 4000, "Speculation pays from 4,000 tokens on.")
    answer(page, [told(text, seconds, tier=tier), read(tokens)], [told(text, 2.0), read(tokens)])
    compare(page)
    headline(page, f"^{re.escape(expected)}$")
    assert re.search(why, page.locator("#why").inner_text())
    assert (page.locator("#headline").get_attribute("class") == "same") == (why == "^$")


@pytest.mark.parametrize(
    ("pays_from", "pays", "hint", "why"),
    [
        (600, "Speculation pays from 600 tokens on.", "which gains little", "Try a document of more than 600 tokens"),
        (200, "Speculation pays from 200 tokens on.", "", "100 % of the tokens were proposed correctly"),
        (
            None,
            "Speculation should not pay: KV is small.",
            "",
            "Why not faster. Speculation should not pay: KV is small.$",
        ),
    ],
)
def test_browser_break_even_is_the_servers(page: Page, pays_from: int | None, pays: str, hint: str, why: str) -> None:
    """The page shows the server's break-even in its help, below the document, and as the reason of a slow text."""
    card(page, pays_from, pays)
    page.get_by_label("Document", exact=True).fill(DOCUMENT + "!")
    expect(page.locator("#size")).to_contain_text(
        f"tokens: a short text, {hint}" if hint else "tokens. The context holds"
    )
    text = "twenty tokens of text"
    answer(page, [told(text, 2.0, tier="retrieval"), read(500)], [told(text, 2.0), read(500)])
    compare(page)
    headline(page, "^1.0 times as fast, the same text$")
    assert re.search(why, page.locator("#why").inner_text())


@pytest.mark.parametrize(("share", "loops"), [(0.09, False), (0.1, True), (0.38, True)])
def test_browser_loop_is_not_celebrated(page: Page, share: float, loops: bool) -> None:
    """A text that repeats itself is not shown as a gain, however fast it came."""
    text = "twenty tokens of text"
    answer(page, [told(text, 1.0, tier="ngram"), read(9000, share)], [told(text, 2.0), read(9000, share)])
    compare(page)
    headline(page, "^The same text, but it repeats itself$" if loops else "^2.0 times as fast, the same text$")
    assert (page.locator("#headline").get_attribute("class") == "same") == (not loops)
    reason = page.locator("#why").inner_text()
    assert (f"repeats itself ({100 * share:.0f} % of its 8-grams)" in reason and "says little" in reason) == loops


def test_browser_difference_is_shown(page: Page) -> None:
    def lie(route: Any) -> None:
        if '"mode":"ar"' in route.request.post_data:
            return route.continue_(post_data=route.request.post_data.replace('"seed":7', '"seed":8'))
        return route.continue_()

    page.route("**/v1/completions", lie)
    compare(page)
    headline(page, "but the texts differ$")
    expect(page.locator("#why")).to_contain_text("Only the coupling seeded promises")


def test_browser_few_tokens_show_no_speedup(page: Page) -> None:
    answer(page, [told("few"), read(9000)])
    compare(page)
    headline(page, "^The same text$")
    expect(page.locator("#facts")).to_contain_text("too few")


def test_browser_time_left_is_shown_while_reading(page: Page) -> None:
    """The time left follows the page's own clock, in a stream that goes on until it is stopped."""
    page.evaluate(
        """() => {
            let now = 0;
            performance.now = () => now;
            const frame = tokens => { now += 1000; return "data: " + JSON.stringify(
                {choices: [], prompt_progress: {processed: tokens, total: 10000}}) + "\\n\\n"; };
            const counts = [1000, 2000, 3000];
            const pull = async control => {
                const tokens = counts.shift();
                if (tokens) control.enqueue(new TextEncoder().encode(frame(tokens)));
                else await new Promise(() => {});
            };
            window.fetch = async () => new Response(new ReadableStream({pull}, {highWaterMark: 0}));
        }"""
    )
    compare(page)
    expect(page.locator("#status")).to_have_text("1 of 2: reading the document")
    expect(page.locator("#left")).to_have_text("3,000 of 10,000 tokens, about 7 s left")
    assert page.locator("#bar").evaluate("bar => bar.value") == 0.3


def test_browser_reading_progress_comes_from_server(page: Page) -> None:
    page.evaluate(
        """() => {
            window.told = [];
            const watch = () => window.told.push(document.getElementById("left").textContent);
            new MutationObserver(watch).observe(document.getElementById("left"), {childList: true});
        }"""
    )
    page.get_by_label("Document", exact=True).fill("no one has read this " * 60)
    compare(page)
    headline(page, "the same text$")
    lines = page.evaluate("window.told")
    sizes = {int(of.replace(",", "")) for line in lines for of in re.findall(r"of ([\d,]+) tokens", line)}
    assert 40 in sizes and max(sizes) > 100, lines


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 360, 1280])
def test_browser_layout_fits_and_has_contrast(page: Page, scheme: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    answer(page, [told("twenty tokens of text", seen=(0, 30, 100)), read(500)])
    compare(page)
    headline(page, "the same text$")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(CONTRASTS) > 4.5
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    if width < 400:
        small = "b => [...b].filter(e => e.offsetHeight && e.offsetHeight < 44).map(e => e.id)"
        assert page.eval_on_selector_all("button, select, input[type=number], input[type=text]", small) == []


CONTRASTS = """() => {
    const light = ([r, g, b]) => {
        const linear = c => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
        return .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
    };
    const between = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    const numbers = text => text.match(/[\\d.]+/g).map(Number);
    const ground = element => {
        const color = numbers(getComputedStyle(element).backgroundColor);
        return color.length > 3 && !color[3] ? ground(element.parentElement) : color;
    };
    for (const tier of ["draft", "ngram", "retrieval", "streaming", "full"]) {
        const span = Object.assign(document.createElement("span"), {className: tier, textContent: tier});
        document.getElementById("tiered").append(span);
    }
    const words = [...document.querySelectorAll("h1, h2, h3, p, label, span, li, th, td, button, summary, figcaption")]
        .filter(word => word.offsetHeight && word.textContent && !word.disabled);
    return Math.min(...words.map(word => between(light(numbers(getComputedStyle(word).color)), light(ground(word)))));
}"""
