"""The playground in Chromium: what people see and click, on a screen and on a phone, with and without a key."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.helpers.server_process import KEY, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
DOCUMENT = "the cat sat on the mat " * 40
WAIT = 60_000  # milliseconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        sync_api.expect.set_options(timeout=WAIT)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url(pair: Path) -> Iterator[str]:
    with served(pair, "--mode", "triforce") as (_, url):
        yield url


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """The page, its key given, and a document in it; nothing may go wrong in it, and it may ask nobody else."""
    context = browser.new_context()
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else wrong.append(request.url))
    page.goto(url)
    page.get_by_label("Key of this server").fill(KEY)
    page.keyboard.press("Tab")
    sync_api.expect(page.locator("#about")).to_contain_text("2,048 tokens of context")
    sync_api.expect(page.get_by_label("Document", exact=True)).not_to_be_empty()
    page.locator("summary").click()
    page.get_by_label("Tokens at most").fill("40")
    page.get_by_label("Question").fill("")
    page.get_by_label("Document", exact=True).fill(DOCUMENT)
    yield page
    context.close()
    assert not [line for line in wrong if "Failed to load resource" not in line]  # which the page has shown


def compare(page: Page) -> None:
    page.get_by_role("button", name="Compare").click()


def headline(page: Page, pattern: str) -> None:
    sync_api.expect(page.locator("#headline")).to_have_text(re.compile(pattern))


def spans(page: Page, selector: str) -> list[list[str]]:
    found: Any = page.eval_on_selector_all(f"{selector} span", "all => all.map(s => [s.className, s.textContent])")
    return list(found)


def answer(page: Page, events: list[dict[str, Any]], plain: list[dict[str, Any]] | None = None) -> None:
    """Have streams say this, and those of plain decoding perhaps something else: a server as fast as a test likes."""

    def stream(route: Any) -> None:
        said = plain if plain and '"mode":"ar"' in route.request.post_data else events
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in said) + "data: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/completions", stream)


def told(text: str, seconds: float = 1.0, seen: tuple[int, ...] = (), tier: str = "full") -> dict[str, Any]:
    """A piece of as many tokens as characters."""
    tiers = [{"name": name, "proposed": 50, "accepted": 10, "passes": 1} for name in ("retrieval", "full")]
    look = {"tokens": 9000, "seconds": seconds, "seen": seen, "tiers": tiers}
    many = {"token_tiers": [tier] * len(text), "token_characters": [1] * len(text)}
    return {"choices": [{"index": 0, "text": text, "trace": look, **many}]}


def read(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": tokens}}


def test_the_first_view_has_a_sample_and_a_button(page: Page) -> None:
    page.reload()
    page.get_by_label("Key of this server").fill(KEY)
    page.keyboard.press("Tab")
    document = page.get_by_label("Document", exact=True)
    sync_api.expect(document).to_have_value(re.compile("Jonathan Harker", re.I))
    (length,) = page.locator("#lengths button[aria-pressed=true]").all_inner_texts()
    sync_api.expect(page.locator("#size")).to_contain_text("which gains little")
    (count,) = re.findall(r"^([\d,]+) tokens", page.locator("#size").inner_text())
    assert abs(int(count.replace(",", "")) / int(length.replace(",", "")) - 1) < 0.25
    assert page.get_by_role("button", name="Compare").is_visible()
    assert not page.get_by_label("Seed").is_visible() and not page.locator("#result").is_visible()
    document.press("End")
    document.press_sequentially("!")
    assert page.locator("#lengths button[aria-pressed=true]").count() == 0


def test_a_text_comes_coloured_and_is_that_of_plain_decoding(page: Page, url: str) -> None:
    with page.expect_response("**/v1/completions") as heard:
        compare(page)
    headline(page, r"^\d+(\.\d)? times as fast, the same text$")
    text, plain = page.locator("#tiered").text_content(), page.locator("#plain").text_content()
    body = {"prompt": DOCUMENT, "max_tokens": 40, "temperature": 0.6, "seed": 7}
    headers = {"authorization": f"Bearer {KEY}"}
    (wanted,) = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).json()["choices"]
    assert text == plain == wanted["text"]
    assert {tier for tier, _ in spans(page, "#plain")} == {"full"}
    tiers = re.findall(r'"(draft|retrieval|full)"', "".join(re.findall(r'"token_tiers": (.*?])', heard.value.text())))
    assert {tier for tier, _ in spans(page, "#tiered")} == set(tiers)
    assert [tier for tier, _ in spans(page, "#legend")] == ["draft", "retrieval", "full"]
    rows = page.locator("#tiers tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["draft", "retrieval", "full"]
    in_text = {row.split()[0]: int(row.split()[1]) for row in rows}
    assert in_text == {tier: tiers.count(tier) for tier in in_text} and len(tiers) == 40
    assert re.fullmatch(r"40 tokens, [\d.]+ per second", page.locator("#tiered-speed").inner_text())
    assert not page.locator("#going").is_visible()


@pytest.mark.parametrize(
    ("seconds", "tokens", "tier", "said", "why"),
    [
        (1.0, 9000, "retrieval", "2.0 times as fast, the same text", "^$"),
        (2.5, 500, "retrieval", "0.8 times as fast, the same text", "the KV cache of 500 tokens is small"),
        (2.0, 9000, "retrieval", "1.0 times as fast, the same text", "100 % of the tokens had been guessed right"),
        (1.0, 9000, "full", "As fast as plain decoding, the same text", "guessing was found not to pay.*is chance"),
        (1.0, 500, "full", "As fast as plain decoding, the same text", "the KV cache of 500 tokens.*is chance"),
    ],
)
def test_the_headline_is_what_was_measured(
    page: Page, seconds: float, tokens: int, tier: str, said: str, why: str
) -> None:
    text = "twenty tokens of text"
    answer(page, [told(text, seconds, tier=tier), read(tokens)], [told(text, 2.0), read(tokens)])
    compare(page)
    headline(page, f"^{re.escape(said)}$")
    assert re.search(why, page.locator("#why").inner_text())


def test_a_difference_is_said(page: Page) -> None:
    def lie(route: Any) -> None:
        if '"mode":"ar"' in route.request.post_data:
            return route.continue_(post_data=route.request.post_data.replace('"seed":7', '"seed":8'))
        return route.continue_()

    page.route("**/v1/completions", lie)
    compare(page)
    headline(page, "but the texts differ$")
    sync_api.expect(page.locator("#why")).to_contain_text("Only the coupling seeded promises")


def test_few_tokens_say_nothing_of_the_speed(page: Page) -> None:
    answer(page, [told("few"), read(9000)])
    compare(page)
    headline(page, "^The same text$")
    sync_api.expect(page.locator("#facts")).to_contain_text("too few")


def test_the_time_left_is_told_while_a_document_is_read(page: Page) -> None:
    """By the page's own clock, with a stream that goes on as long as nobody stops it."""
    page.evaluate(
        """() => {
            let now = 0;
            performance.now = () => now;
            const frame = tokens => { now += 1000; return "data: " + JSON.stringify(
                {choices: [], reading: {tokens, of: 10000}}) + "\\n\\n"; };
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
    sync_api.expect(page.locator("#status")).to_have_text("1 of 2: reading the document")
    sync_api.expect(page.locator("#left")).to_have_text("3,000 of 10,000 tokens, about 7 s left")
    assert page.locator("#bar").evaluate("bar => bar.value") == 0.3


def test_a_document_that_is_read_is_told_of_by_the_server(page: Page) -> None:
    page.evaluate(
        """() => {
            window.told = [];
            const watch = () => window.told.push(document.getElementById("left").textContent);
            new MutationObserver(watch).observe(document.getElementById("left"), {childList: true});
        }"""
    )
    page.get_by_label("Document", exact=True).fill("nobody has read this " * 60)
    compare(page)
    headline(page, "the same text$")
    lines = page.evaluate("window.told")
    sizes = {int(of.replace(",", "")) for line in lines for of in re.findall(r"of ([\d,]+) tokens", line)}
    assert 40 in sizes and max(sizes) > 100, lines


def test_the_map_shows_what_retrieval_sees(page: Page) -> None:
    compare(page)
    headline(page, "the same text$")
    label = page.locator("#map").get_attribute("aria-label") or ""
    (percent,) = re.findall(r"see (\d+) %", label)
    assert 0 < int(percent) < 40
    painted = pixels(page)
    assert 0 < sum(alpha > 0 for *_, alpha in painted) < 256 and painted[0][3] and painted[-1][3]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_more_is_stronger_on_the_map_and_on_its_scale(page: Page, scheme: Any) -> None:
    """Against the ground it lies on, whichever that is."""
    page.emulate_media(color_scheme=scheme)
    answer(page, [told("twenty tokens of text", seen=(0, 30, 100)), read(9000)])
    compare(page)
    headline(page, "the same text$")
    colors = page.evaluate(
        """() => ["color", "backgroundColor"].map(name => getComputedStyle(document.getElementById("map"))[name])"""
    )
    ink, ground = ([int(n) for n in re.findall(r"\d+", color)] for color in colors)
    none, some, all_of_it = pixels(page)[10], pixels(page)[120], pixels(page)[250]
    assert none[3] == 0 and 0 < some[3] < all_of_it[3] == 255 and all_of_it[:3] == ink
    assert sum(abs(a - b) for a, b in zip(ink, ground, strict=True)) > 200
    ramp = page.locator(".ramp").evaluate("e => getComputedStyle(e).backgroundImage")
    assert ramp == f"linear-gradient(to right, {colors[1]}, {colors[0]})"
    assert page.locator(".key").inner_text().split("\n")[0] == "no head"
    assert not re.search("dark|light", page.locator("#map-note").inner_text(), re.I)


@pytest.mark.parametrize(
    ("seen", "said"),
    [((), "was not used"), ((100, 100), "It read the whole text"), ((0, 100), "")],
)
def test_there_is_no_map_where_there_is_nothing_to_see(page: Page, seen: tuple[int, ...], said: str) -> None:
    answer(page, [told("twenty tokens of text", seen=seen), read(9000)])
    compare(page)
    headline(page, "the same text$")
    sync_api.expect(page.locator("#map-none")).to_contain_text(said)
    assert page.locator("#map").is_visible() == (not said)


def pixels(page: Page) -> list[list[int]]:
    """Of the latest line of the map."""
    line: Any = page.eval_on_selector("#map", "c => [...c.getContext('2d').getImageData(0, 47, 256, 1).data]")
    return [line[i : i + 4] for i in range(0, len(line), 4)]


def test_by_keyboard_alone(page: Page) -> None:
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
    page.get_by_label("Question").focus()
    page.keyboard.press("Enter")
    headline(page, "the same text$")


def test_a_question(page: Page) -> None:
    page.get_by_label("Document", exact=True).fill("the cat sat")
    page.get_by_label("Question").fill("what did it do")
    page.get_by_label("Compare with plain decoding").uncheck()
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Run").click()
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "the cat sat\n\nwhat did it do"}]
    sync_api.expect(page.locator("#going")).not_to_be_visible()
    assert page.locator("#tiered").text_content() and not page.locator("#beside").is_visible()


def test_a_model_that_does_not_chat_is_asked_nothing(page: Page) -> None:
    def base(route: Any) -> None:
        card = route.fetch().json()
        card["data"][0]["triforce"]["chats"] = False
        route.fulfill(json=card)

    page.route("**/v1/models", base)
    page.get_by_label("Question").fill("what did it do")
    page.evaluate("learn()")
    sync_api.expect(page.locator("#continuing")).to_be_visible()
    assert not page.locator("#asking").is_visible()
    with page.expect_request("**/v1/completions") as asked:
        compare(page)
    assert asked.value.post_data_json["prompt"] == DOCUMENT
    headline(page, "the same text$")


def test_it_stops_when_told(page: Page) -> None:
    """Before the first word, as nobody knows how fast a text is done: the server takes as long as it likes here."""
    page.route("**/v1/completions", lambda route: None)
    compare(page)
    page.get_by_role("button", name="Stop").click()
    sync_api.expect(page.locator("#facts")).to_have_text("Stopped.")
    assert page.get_by_role("button", name="Compare").is_enabled()


def test_a_file_is_dropped_or_opened(page: Page, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("the cat of a file")
    page.locator("#file").set_input_files(tmp_path / "book.txt")
    sync_api.expect(page.get_by_label("Document", exact=True)).to_have_value("the cat of a file")
    page.evaluate(
        """() => {
            const carried = new DataTransfer();
            carried.items.add(new File(["the dropped cat"], "cat.txt"));
            const how = {dataTransfer: carried, bubbles: true, cancelable: true};
            document.getElementById("document").dispatchEvent(new DragEvent("drop", how));
        }"""
    )
    sync_api.expect(page.get_by_label("Document", exact=True)).to_have_value("the dropped cat")


def test_what_is_refused_is_said(page: Page) -> None:
    page.get_by_label("Document", exact=True).fill("")
    compare(page)
    sync_api.expect(page.get_by_role("alert")).to_contain_text("prompt")
    page.route("**/v1/completions", lambda route: route.abort())
    compare(page)
    sync_api.expect(page.get_by_role("alert")).to_have_text("The server does not answer. Is it still running?")
    page.unroute("**/v1/completions")
    page.get_by_label("Key of this server").fill("another-key-that-is-wrong")
    page.keyboard.press("Tab")
    sync_api.expect(page.get_by_role("alert")).to_contain_text("a key is needed")
    assert page.locator("#keyed").is_visible() and not page.locator("#result").is_visible()


def test_what_is_wrong_under_advanced_is_shown(page: Page) -> None:
    page.get_by_label("Tokens at most").fill("")
    page.locator("summary").click()
    assert not page.get_by_label("Tokens at most").is_visible()
    compare(page)
    assert page.get_by_label("Tokens at most").is_visible() and not page.locator("#result").is_visible()


def test_the_key_is_kept_nowhere(page: Page, url: str) -> None:
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
    assert KEY not in kept
    page.reload()
    sync_api.expect(page.get_by_label("Key of this server")).to_have_value("")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 360, 1280])
def test_it_fits_and_can_be_read(page: Page, scheme: Any, width: int) -> None:
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
