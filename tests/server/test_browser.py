"""The playground in Chromium: what people see and click, on a screen and on a phone, with and without a key."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from process import KEY, served

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
    """The page, its key given; nothing may go wrong in it, and it may ask nobody else."""
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
    page.get_by_label("Tokens at most").fill("40")
    yield page
    context.close()
    assert not [line for line in wrong if "status of 4" not in line]  # a refusal, which the page has shown


def status(page: Page, text: str) -> None:
    sync_api.expect(page.locator("#status")).to_contain_text(text)


def spans(page: Page, selector: str) -> list[list[str]]:
    found: Any = page.eval_on_selector_all(f"{selector} span", "all => all.map(s => [s.className, s.textContent])")
    return list(found)


def test_a_text_comes_coloured_and_is_that_of_plain_decoding(page: Page, url: str) -> None:
    page.get_by_label("Document").fill(DOCUMENT)
    page.get_by_label("Then the same seed").check()
    page.get_by_role("button", name="Run").click()
    status(page, "Done: with tiers")
    sync_api.expect(page.locator("#verdict")).to_contain_text("The same text")
    text, plain = page.locator("#tiered").text_content(), page.locator("#plain").text_content()
    body = {"prompt": DOCUMENT, "max_tokens": 40, "temperature": 0.6, "seed": 7, "tier_stats": True}
    headers = {"authorization": f"Bearer {KEY}"}
    (wanted,) = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).json()["choices"]
    assert text == plain == wanted["text"]
    assert {tier for tier, _ in spans(page, "#plain")} == {"full"}
    assert {tier for tier, _ in spans(page, "#tiered")} == set(wanted["token_tiers"])
    told = page.locator("#tiers tr").all_inner_texts()
    assert [row.split()[0] for row in told] == ["draft", "retrieval", "full"]
    in_text = {row.split()[0]: int(row.split()[1]) for row in told}
    assert in_text == {tier: wanted["token_tiers"].count(tier) for tier in in_text}
    assert re.fullmatch(r"40 tokens, [\d.]+ per second", page.locator("#speed").inner_text())
    sync_api.expect(page.locator("#size")).to_contain_text("of 2,048 tokens")


def test_the_map_shows_what_retrieval_sees(page: Page) -> None:
    page.get_by_label("Document").fill(DOCUMENT)
    page.get_by_role("button", name="Run").click()
    status(page, "Done")
    label = page.locator("#map").get_attribute("aria-label") or ""
    (percent,) = re.findall(r"see (\d+) %", label)
    assert 0 < int(percent) < 40
    painted: Any = page.eval_on_selector(
        "#map", "c => [...c.getContext('2d').getImageData(0, 47, 256, 1).data].filter((_, i) => i % 4 === 3)"
    )
    assert 0 < sum(alpha > 0 for alpha in painted) < 256 and painted[0] and painted[-1]


def test_a_difference_is_said(page: Page) -> None:
    def lie(route: Any) -> None:
        if '"mode":"ar"' in route.request.post_data:
            return route.continue_(post_data=route.request.post_data.replace('"seed":7', '"seed":8'))
        return route.continue_()

    page.route("**/v1/completions", lie)
    page.get_by_label("Document").fill(DOCUMENT)
    page.get_by_label("Then the same seed").check()
    page.get_by_role("button", name="Run").click()
    status(page, "Done: with tiers")
    sync_api.expect(page.locator("#verdict")).to_contain_text("The texts differ")


def test_by_keyboard_alone(page: Page) -> None:
    page.get_by_label("Document").focus()
    page.keyboard.type("the cat sat")
    visited = []
    for _ in range(12):
        page.keyboard.press("Tab")
        visited.append(page.evaluate("document.activeElement.id || document.activeElement.value"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", visited[-1]
        if visited[-1] == "compare":
            page.keyboard.press("Space")
        if visited[-1] == "run":
            break
    assert visited == ["open", "continue", "tokens", "temperature", "seed", "mode", "compare", "run"]
    page.keyboard.press("Enter")
    status(page, "Done: with tiers")


def test_a_question(page: Page) -> None:
    page.get_by_label("Document").fill("the cat sat")
    page.get_by_label("Ask about it").check()
    page.get_by_label("Question").fill("what did it do")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Run").click()
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "the cat sat\n\nwhat did it do"}]
    status(page, "Done")
    assert page.locator("#tiered").text_content()


def test_it_stops_when_told(page: Page) -> None:
    """Before the first word, as nobody knows how fast a text is done: the server takes as long as it likes here."""
    page.route("**/v1/completions", lambda route: None)
    page.get_by_label("Document").fill(DOCUMENT)
    page.get_by_role("button", name="Run").click()
    page.get_by_role("button", name="Stop").click()
    status(page, "Stopped")
    assert page.get_by_role("button", name="Run").is_enabled()


def test_a_file_is_dropped_or_opened(page: Page, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("the cat of a file")
    page.locator("#file").set_input_files(tmp_path / "book.txt")
    sync_api.expect(page.get_by_label("Document")).to_have_value("the cat of a file")
    page.evaluate(
        """() => {
            const carried = new DataTransfer();
            carried.items.add(new File(["the dropped cat"], "cat.txt"));
            const how = {dataTransfer: carried, bubbles: true, cancelable: true};
            document.getElementById("document").dispatchEvent(new DragEvent("drop", how));
        }"""
    )
    sync_api.expect(page.get_by_label("Document")).to_have_value("the dropped cat")


def test_what_is_refused_is_said(page: Page) -> None:
    page.get_by_role("button", name="Run").click()
    sync_api.expect(page.get_by_role("alert")).to_contain_text("prompt")
    page.get_by_label("Key of this server").fill("another-key-that-is-wrong")
    page.keyboard.press("Tab")
    sync_api.expect(page.locator("#keyed")).to_be_visible()
    page.get_by_role("button", name="Run").click()
    sync_api.expect(page.get_by_role("alert")).to_contain_text("a key is needed")


def test_the_key_is_kept_nowhere(page: Page, url: str) -> None:
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
    assert KEY not in kept
    page.reload()
    sync_api.expect(page.get_by_label("Key of this server")).to_have_value("")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_it_fits_and_can_be_read(browser: Browser, url: str, scheme: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.goto(url)
    sync_api.expect(page.get_by_label("Key of this server")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(CONTRASTS) > 4.5
    if width < 400:
        small = "b => [...b].filter(e => e.offsetHeight && e.offsetHeight < 44).map(e => e.id)"
        assert page.eval_on_selector_all("button, select, input[type=number], input[type=text]", small) == []
    page.close()


CONTRASTS = """() => {
    const light = text => {
        const linear = c => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
        const [r, g, b] = text.match(/[\\d.]+/g).map(c => linear(c / 255));
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const between = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    const pairs = ["draft", "retrieval", "full"].map(tier => {
        const span = Object.assign(document.createElement("span"), {className: tier});
        document.getElementById("tiered").append(span);
        const style = getComputedStyle(span);
        return between(light(style.color), light(style.backgroundColor));
    });
    const paper = light(getComputedStyle(document.body).backgroundColor);
    const words = [...document.querySelectorAll("h1, p, label, legend")];
    return Math.min(...pairs, ...words.map(word => between(light(getComputedStyle(word).color), paper)));
}"""
