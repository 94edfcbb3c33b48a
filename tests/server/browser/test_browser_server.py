"""The page and its server in Chromium: keys, proxies, a server that changes, keyboard, focus and scrolling."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.helpers.page_browser import (
    CHATS,
    MODELS,
    answer_with,
    ask,
    change_card,
    check,
    composer,
    expect,
    finish,
    hold_streams,
    look_again,
    piece,
    send,
    set_settings,
    unlock,
    usage,
)
from tests.helpers.server_process import KEY

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def test_browser_enter_unlocks(locked_page: Page) -> None:
    expect(locked_page.locator("#about")).to_have_text("is locked")
    unlock(locked_page)
    expect(locked_page.get_by_label("Key of this server")).to_have_count(0)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("another-key-that-is-wrong", "This key is not accepted."),
        ("schlüssel-mit-umlaut", "Keys are letters, digits and signs of ASCII; this one has “ü”."),
        ("ключ", "this one has “к”"),
        ("", "Type the key with which this server was started."),
    ],
)
def test_browser_wrong_key_is_told(locked_page: Page, key: str, message: str) -> None:
    locked_page.get_by_label("Key of this server").fill(key)
    locked_page.keyboard.press("Enter")
    expect(locked_page.locator("#key-fault")).to_contain_text(message)
    unlock(locked_page)


def test_browser_key_lasts_as_long_as_the_tab(page: Page, url: str) -> None:
    page.reload()
    expect(page.locator("#about")).to_contain_text("2,048 tokens of context")
    stores = page.evaluate("JSON.stringify([{...localStorage}, document.cookie, location.href])")
    assert KEY not in stores
    second_tab = page.context.new_page()
    second_tab.goto(url)
    expect(second_tab.get_by_label("Key of this server")).to_have_value("")
    second_tab.close()
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Forget the key").click()
    page.keyboard.press("Escape")
    expect(page.get_by_label("Key of this server")).to_be_visible()


@contextmanager
def proxy(url: str, prefix: str) -> Iterator[str]:
    """Serve a server's addresses below a prefix, as a reverse proxy does, and yield the new URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(prefix):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")
            }
            path = "/" + self.path.removeprefix(prefix)
            with httpx.stream(self.command, url + path, headers=headers, content=body, timeout=60) as answer:
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name not in ("transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                for chunk in answer.iter_raw():
                    self.wfile.write(chunk)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{prefix}"
    finally:
        server.shutdown()
        server.server_close()


def test_browser_page_works_below_a_prefix(browser: Browser, url: str) -> None:
    with proxy(url, "/llm/") as address:
        context = browser.new_context()
        page = context.new_page()
        page.goto(address)
        unlock(page)
        set_settings(page, max_tokens="12", temperature="0")
        answer = ask(page, "the cat")
        expect(answer.locator(".markdown")).to_be_visible()  # the renderer was found
        check(answer)
        expect(answer.locator(".headline")).to_contain_text("Identical")
        context.close()


def test_browser_server_that_was_down_is_asked_again(page: Page) -> None:
    page.route(MODELS, lambda route: route.abort())
    page.reload()
    expect(page.locator("#about")).to_have_text("The server does not answer. This page asks again every two seconds.")
    page.unroute(MODELS)
    expect(page.locator("#about")).to_contain_text("2,048 tokens of context")


def test_browser_changed_server_is_noticed(page: Page) -> None:
    change_card(page, {"id": "another-model", "max_model_len": 4096})
    expect(page.locator("#about")).to_have_text("serves another-model, 4,096 tokens of context")
    page.unroute(MODELS)
    look_again(page)
    expect(page.locator("#about")).to_have_text("serves target, 2,048 tokens of context")


def test_browser_change_is_noticed_by_an_answer(page: Page) -> None:
    """An answer of another model makes the page ask which model it is."""
    answer_with(page, [piece("text") | {"system_fingerprint": "fp_new", "model": "new"}, finish(), usage(9)])
    with page.expect_response(MODELS):
        ask(page, "the cat")


def test_browser_keyboard_alone_suffices(page: Page) -> None:
    visited = []
    page.get_by_role("link", name="To the question").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "composer"
    composer(page).fill("the cat")
    for _ in range(30):
        page.keyboard.press("Tab")
        name = page.evaluate("(e => e === document.body ? 'BODY' : e.textContent || e.tagName)(document.activeElement)")
        visited.append(name)
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert name == "BODY" or outline == "solid", name
        if name == "Settings":
            break
    assert {"Ask", "+ Files", "+ Folder", "New conversation", "Runs", "Settings"} <= set(visited)
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert page.evaluate("document.activeElement.textContent") == "Settings"  # the focus goes back
    page.keyboard.press("Control+Enter")
    expect(page.locator(".ending")).to_have_count(1)
    expect(page.get_by_role("button", name="Check against plain decoding")).to_be_enabled()
    page.get_by_role("button", name="Check against plain decoding").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".headline")).to_contain_text("Identical")


def test_browser_enter_sends_and_shift_enter_does_not(page: Page) -> None:
    composer(page).fill("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(composer(page)).to_have_value("one\ntwo")
    with page.expect_request(CHATS) as sent:
        page.keyboard.press("Enter")
    assert sent.value.post_data_json["messages"][0]["content"] == "one\ntwo"
    expect(page.locator(".ending")).to_have_count(1)
    assert page.evaluate("document.activeElement.id") == "composer"  # the focus stays after a run


def test_browser_escape_stops(page: Page) -> None:
    hold_streams(page, 3)
    send(page, "the cat sat")
    expect(page.locator(".figures")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".ending")).to_have_text("You stopped this answer.")
    assert page.evaluate("document.activeElement.id") == "composer"


def test_browser_visitor_who_scrolled_up_stays(page: Page) -> None:
    lines = "\n\n".join(f"line {n}" for n in range(80))
    answer_with(page, [piece(lines), finish(), usage(90)])
    ask(page, "much")
    bottom = page.evaluate("scrollY")
    assert bottom > 500  # the page has followed the text
    page.evaluate("scrollTo(0, 100)")
    page.wait_for_timeout(200)
    page.get_by_role("button", name="Check against plain decoding").evaluate("button => button.click()")
    expect(page.locator(".headline")).to_have_count(1)
    page.wait_for_timeout(200)
    assert page.evaluate("scrollY") == 100


def test_browser_second_click_asks_once(page: Page) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url) if "completions" in request.url else None)
    composer(page).fill("the cat")
    page.evaluate("""() => { for (let i = 0; i < 3; i++) document.querySelector(".composer").requestSubmit(); }""")
    expect(page.locator(".ending")).to_have_count(1)
    assert len(requests) == 1


def test_browser_refusal_is_told_and_the_question_is_kept(page: Page) -> None:
    refusal = {"error": {"message": "the queue is full; try again", "type": "x", "code": None, "param": None}}
    page.route(CHATS, lambda route: route.fulfill(status=429, json=refusal))
    answer = ask(page, "the cat")
    expect(answer.locator(".fault")).to_have_text("the queue is full; try again")
    expect(page.locator(".question .plain")).to_have_text("the cat")
    page.unroute(CHATS)
    answer.get_by_role("button", name="Try again").click()
    expect(answer.locator(".ending")).to_have_count(1)
