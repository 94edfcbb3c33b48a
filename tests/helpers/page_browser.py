"""The page in Chromium: a browser, a server, actions of visitors, and streams that a test makes up."""

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
    from playwright.sync_api import Browser, Locator, LocatorAssertions, Page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WAIT = 30_000  # milliseconds
CHATS = "**/v1/chat/completions"
MODELS = "**/v1/models"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("no Chromium here")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--enable-precise-memory-info", "--js-flags=--expose-gc"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        sync_api.expect.set_options(timeout=WAIT)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url(pair: Path) -> Iterator[str]:
    with served(pair, "--mode", "triforce") as (_, url):
        yield url


@pytest.fixture
def locked_page(browser: Browser, url: str) -> Iterator[Page]:
    """Return the page before it has a key. Errors on the page and requests to other hosts fail the test."""
    context = browser.new_context(accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(WAIT)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    page.on("request", lambda sent: None if sent.url.startswith((url, "data:", "blob:")) else wrong.append(sent.url))
    page.goto(url)
    yield page
    context.close()
    shown_on_page = "Failed to load resource"  # the page has told the visitor
    if unexpected := [line for line in wrong if shown_on_page not in line]:
        pytest.fail(str(unexpected))


@pytest.fixture
def page(locked_page: Page) -> Page:
    """Return the page with a key, and settings for short answers."""
    unlock(locked_page)
    set_settings(locked_page, max_tokens="24", temperature="0")
    return locked_page


def unlock(page: Page, context: str = "2,048") -> None:
    """Send the key, and wait for the model. context: its tokens, as the page shows them."""
    page.get_by_label("Key of this server").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#about")).to_contain_text(f"{context} tokens of context")


def set_settings(page: Page, **values: str) -> None:
    """Choose settings in their dialog."""
    page.get_by_role("button", name="Settings").click()
    for name, value in values.items():
        field = page.locator(f"dialog #{name}")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    close_dialog(page)


def close_dialog(page: Page) -> None:
    page.locator("dialog").get_by_role("button", name="Close").click()
    expect(page.locator("dialog")).to_have_count(0)


def expect(locator: Locator) -> LocatorAssertions:
    from playwright import sync_api

    return sync_api.expect(locator)


def composer(page: Page) -> Locator:
    return page.locator("#composer")


def send(page: Page, question: str) -> None:
    composer(page).fill(question)
    page.keyboard.press("Enter")


def ask(page: Page, question: str) -> Locator:
    """Ask, wait for the end of the answer, and return its turn."""
    count = page.locator(".answer").count()
    composer(page).fill(question)
    expect(page.locator(".ask button[type=submit]")).to_be_enabled()
    page.keyboard.press("Enter")
    answer = page.locator(".answer").nth(count)
    expect(answer.locator(".ending, .fault")).to_have_count(1)
    expect(answer.get_by_role("button", name="Regenerate")).to_be_enabled()
    return answer


def check(answer: Locator) -> None:
    """Check an answer, and wait for the verdict."""
    answer.get_by_role("button", name=re.compile("^Check")).click()
    expect(answer.get_by_role("button", name="Check again")).to_be_enabled()


def piece(text: str, **fields: Any) -> dict[str, Any]:
    """Return a chunk of a chat with one token per character. fields: of the delta or the choice."""
    delta = {"content": text} | fields.pop("delta", {})
    tier = fields.pop("tier", "full")
    tiers = [{"name": name, "proposed": 50, "accepted": 10, "passes": 10} for name in ("retrieval", "full")]
    trace = {"tokens": 9000, "seconds": fields.pop("seconds", 1.0), "seen": fields.pop("seen", []), "tiers": tiers}
    ids = fields.pop("ids", [ord(letter) for letter in text])
    tokens = {"token_tiers": [tier] * len(ids), "token_characters": [1] * len(ids), "token_ids": ids}
    return {"choices": [{"index": 0, "delta": delta, "trace": trace, **tokens, **fields}]}


def usage(tokens: int, cached: int = 0, repeated: float = 0.0) -> dict[str, Any]:
    counts = {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": counts | {"repeated_8_grams": [repeated]}}


def finish(reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def streamed(page: Page, events: list[dict[str, Any]]) -> str:
    """Return the body of a stream of the served model with these events."""
    card = model_card(page)
    head = {"model": card["id"], "system_fingerprint": card["triforce"]["system_fingerprint"]}
    opening = {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": [1, 2, 3]}
    return "".join(f"data: {json.dumps(head | event)}\n\n" for event in [opening, *events]) + "data: [DONE]\n\n"


def answer_with(page: Page, events: list[dict[str, Any]], plain: list[dict[str, Any]] | None = None) -> None:
    """Let chats return `events`, and chats of plain decoding perhaps `plain`, without any delay."""
    bodies = streamed(page, events), streamed(page, events if plain is None else plain)

    def stream(route: Any) -> None:
        body = bodies['"mode":"ar"' in route.request.post_data]
        route.fulfill(body=body, content_type="text/event-stream")

    page.unroute(CHATS)
    page.route(CHATS, stream)


def model_card(page: Page) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.get(f"{page.url.split('#')[0]}v1/models", headers=headers)
    card: dict[str, Any] = answer.json()["data"][0]
    return card


def change_card(page: Page, changes: dict[str, Any] | None = None, **capabilities: Any) -> None:
    """Let the server's model card differ, and wait until the page has looked at it."""

    def changed(route: Any) -> None:
        response = route.fetch()
        body = response.json()
        body["data"][0] |= changes or {}
        body["data"][0]["triforce"] |= capabilities
        route.fulfill(response=response, json=body)

    page.unroute(MODELS)
    page.route(MODELS, changed)
    with page.expect_response(MODELS):
        look_again(page)


def look_again(page: Page) -> None:
    """Let the page ask the server which model it has, as when a visitor comes back to it."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def drop(page: Page, files: dict[str, str], selector: str = "body") -> None:
    """Drop files of these names and texts somewhere on the page."""
    page.evaluate(
        """([files, selector]) => {
            const carried = new DataTransfer();
            for (const [name, text] of Object.entries(files)) carried.items.add(new File([text], name));
            const how = {dataTransfer: carried, bubbles: true, cancelable: true};
            document.querySelector(selector).dispatchEvent(new DragEvent("drop", how));
        }""",
        [files, selector],
    )


def attach(page: Page, *files: Path | dict[str, Any]) -> None:
    page.locator("#files").set_input_files(list(files))  # type: ignore[arg-type]


def hold_streams(page: Page, events: int) -> None:
    """Let streams of answers stop coming after this many events, until the page is loaded again."""
    page.evaluate(
        """limit => {
            const real = window.fetch;
            window.fetch = async (address, options) => {
                const response = await real(address, options);
                if (!String(address).endsWith("completions")) return response;
                const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
                const hung = new Promise((_, reject) => options.signal.addEventListener("abort", () => {
                    reader.cancel();
                    reject(new DOMException("", "AbortError"));
                }));
                let rest = "", sent = 0;
                const pull = async control => {
                    while (!rest.includes("\\n\\n")) rest += (await reader.read()).value ?? await hung;
                    const end = rest.indexOf("\\n\\n") + 2;
                    if (++sent > limit) await hung;
                    control.enqueue(new TextEncoder().encode(rest.slice(0, end)));
                    rest = rest.slice(end);
                };
                return new Response(new ReadableStream({pull}, {highWaterMark: 0}), {headers: response.headers});
            };
        }""",
        events,
    )
