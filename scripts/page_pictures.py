"""Makes the docs' pictures of the page: python scripts/page_pictures.py. Needs playwright, Pillow and Chromium.

The pictures show speeds of this machine, so nothing else should run on it. The server has an empty cache folder: it
neither reads nor changes the profiles of the user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
MODEL = Path(__file__).parents[1] / "build" / "smollm2"  # of `make smollm2`
DESKTOP = (1180, 820)
PHONE = (390, 844)
COLORS = 224
PATIENCE = 300_000  # milliseconds to wait for a text


@contextmanager
def server() -> Iterator[str]:
    """Run a server of the small real model, and yield its address."""
    command = [sys.executable, "-m", "triforce", "serve", str(MODEL), "--port", "0"]
    with TemporaryDirectory() as cache:
        environment = os.environ | {"XDG_CACHE_HOME": cache}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        process = subprocess.Popen(command, env=environment, **pipes)
        assert process.stdout
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            process.wait()


@contextmanager
def visit(browser: Browser, url: str, size: tuple[int, int], scheme: str) -> Iterator[Page]:
    """Open the page for a new visitor, and yield it when the server's model is known."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(url)
    expect(page.locator("#about")).to_contain_text("tokens of context", timeout=PATIENCE)
    yield page
    page.close()


def set_settings(page: Page, **values: str) -> None:
    page.get_by_role("button", name="Settings").click()
    for name, value in values.items():
        field = page.locator(f"dialog #{name}")
        field.select_option(value) if name == "mode" else field.fill(value)
    page.locator("dialog").get_by_role("button", name="Close").click()


def begin(page: Page, length: str) -> None:
    """Ask the sample's question about a sample of `length` tokens."""
    page.get_by_role("button", name=length, exact=True).click()
    expect(page.locator(".composer .documents li")).to_have_count(1)
    page.keyboard.press("Enter")


def ask(page: Page, question: str) -> None:
    count = page.locator(".ending").count()
    page.locator("#composer").fill(question)
    page.keyboard.press("Enter")
    expect(page.locator(".ending")).to_have_count(count + 1, timeout=PATIENCE)


def check(page: Page) -> None:
    page.locator(".answer").last.get_by_role("button", name="Check against plain decoding").click()
    expect(page.locator(".headline")).to_have_count(1, timeout=PATIENCE)


def save_screenshot(page: Page, file: Path) -> None:
    """Write a screenshot of the page in few colours, so that the file is small."""
    page.wait_for_timeout(700)
    page.screenshot(path=file)
    Image.open(file).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(file, optimize=True)


def main() -> None:
    with server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with visit(browser, url, PHONE, "light") as page:  # first: a cached document would have no prefill to show
            begin(page, "4,000")
            expect(page.locator(".going")).to_contain_text("left", timeout=PATIENCE)
            save_screenshot(page, PICTURES / "page-reading-phone.png")
            expect(page.locator(".ending")).to_have_count(1, timeout=PATIENCE)
        with visit(browser, url, DESKTOP, "light") as page:
            save_screenshot(page, PICTURES / "page-first.png")
            set_settings(page, mode="ngram", temperature="0", max_tokens="120")
            begin(page, "4,000")
            expect(page.locator(".ending")).to_have_count(1, timeout=PATIENCE)
            ask(page, "Write a summary of what happened in the harbour.")
            check(page)
            page.locator(".headline").scroll_into_view_if_needed()
            save_screenshot(page, PICTURES / "page-proof.png")
            page.locator(".answer").last.get_by_text("How it was made").click()
            page.locator(".answer").last.locator(".details").scroll_into_view_if_needed()
            page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
            save_screenshot(page, PICTURES / "page-made.png")
        with visit(browser, url, PHONE, "dark") as page:
            set_settings(page, temperature="0")
            begin(page, "4,000")
            expect(page.locator(".ending")).to_have_count(1, timeout=PATIENCE)
            check(page)
            save_screenshot(page, PICTURES / "page-dark.png")
        browser.close()


if __name__ == "__main__":
    main()
