"""The playground in Chromium: actions of users, and checks of the page."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.server_process import KEY, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, LocatorAssertions, Page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DOCUMENT = "the cat sat on the mat " * 40
WAIT = 60_000  # milliseconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("no Chromium here")
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
    """Return the page with an API key and a document. Errors on the page and requests to other hosts fail the test."""
    context = browser.new_context()
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else wrong.append(request.url))
    page.goto(url)
    page.get_by_label("Key of this server").fill(KEY)
    page.keyboard.press("Tab")
    expect(page.locator("#about")).to_contain_text("2,048 tokens of context")
    expect(page.get_by_label("Document", exact=True)).not_to_be_empty()
    page.locator("summary").click()
    page.get_by_label("Tokens at most").fill("40")
    page.get_by_label("Ask about it").fill("")
    page.get_by_label("Document", exact=True).fill(DOCUMENT)
    yield page
    context.close()
    assert not [line for line in wrong if "Failed to load resource" not in line]  # the page has shown the error


def expect(locator: Locator) -> LocatorAssertions:
    from playwright import sync_api

    return sync_api.expect(locator)


def compare(page: Page) -> None:
    page.get_by_role("button", name="Compare").click()


def headline(page: Page, pattern: str) -> None:
    expect(page.locator("#headline")).to_have_text(re.compile(pattern))


def spans(page: Page, selector: str) -> list[list[str]]:
    pairs: Any = page.eval_on_selector_all(f"{selector} span", "all => all.map(s => [s.className, s.textContent])")
    return list(pairs)


def answer(page: Page, events: list[dict[str, Any]], plain: list[dict[str, Any]] | None = None) -> None:
    """Let streams return `events`, and streams of plain decoding perhaps `plain`, without any delay."""

    def stream(route: Any) -> None:
        sent_events = plain if plain and '"mode":"ar"' in route.request.post_data else events
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in sent_events) + "data: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/completions", stream)


def told(text: str, seconds: float = 1.0, seen: tuple[int, ...] = (), tier: str = "full") -> dict[str, Any]:
    """Return a chunk with one token per character."""
    tiers = [{"name": name, "proposed": 50, "accepted": 10, "passes": 1} for name in ("retrieval", "full")]
    look = {"tokens": 9000, "seconds": seconds, "seen": seen, "tiers": tiers}
    token_fields = {"token_tiers": [tier] * len(text), "token_characters": [1] * len(text)}
    return {"choices": [{"index": 0, "text": text, "trace": look, **token_fields}]}


def read(tokens: int, repeated: float = 0.0) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": tokens, "repeated_8_grams": [repeated]}}


def card(page: Page, pays_from: int | None, pays: str) -> None:
    """Let the server's model card give the context from which speculation pays, and reload it in the page."""

    def changed(route: Any) -> None:
        response = route.fetch()
        body = response.json()
        body["data"][0]["triforce"] |= {"pays_from": pays_from, "pays": pays}
        route.fulfill(response=response, json=body)

    page.route("**/v1/models", changed)
    page.get_by_label("Key of this server").dispatch_event("change")
    expect(page.locator("#pays")).to_have_text(pays)
