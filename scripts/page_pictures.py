"""Makes the docs' pictures of the playground: python scripts/page_pictures.py. Needs playwright, Pillow and Chromium.

The pictures show speeds of this machine, so nothing else should run on it. The server has an empty cache folder: it
neither reads nor changes the profiles of the user.
"""

from __future__ import annotations

import os
import re
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
DESKTOP = (1280, 800)
PHONE = (390, 844)
COLORS = 224
PATIENCE, SCROLL = 300_000, 700  # milliseconds to wait for a text, and for the end of scrolling


@contextmanager
def server() -> Iterator[str]:
    """Run a server with the shipped pair, and yield its address."""
    command = [sys.executable, "-m", "triforce", "serve", "--port", "0"]
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
    """Open the page, and yield it when the tokens of its sample are counted."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(url)
    expect(page.locator("#size")).to_contain_text("tokens", timeout=PATIENCE)
    yield page
    page.close()


def compare(page: Page, length: str) -> None:
    """Press Compare with a sample of `length` tokens, and wait until both texts are complete."""
    page.locator("#lengths").get_by_text(length, exact=True).click()
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("#headline")).to_have_text(re.compile("text"), timeout=PATIENCE)


def save_screenshot(page: Page, file: Path, full_page: bool = False) -> None:
    """Write a screenshot of the page in few colours, so that the file is small."""
    page.wait_for_timeout(SCROLL)
    page.screenshot(path=file, full_page=full_page)
    Image.open(file).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(file, optimize=True)


def main() -> None:
    with server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        # This visit is the first one: a cached document would have no prefill to show.
        with visit(browser, url, PHONE, "light") as page:
            page.locator("#lengths").get_by_text("32,000", exact=True).click()
            page.get_by_role("button", name="Compare").click()
            expect(page.locator("#left")).to_contain_text("left", timeout=PATIENCE)
            save_screenshot(page, PICTURES / "page-reading-phone.png")
            # The result is awaited, so that the next visits have measured costs of passes.
            expect(page.locator("#headline")).not_to_be_empty(timeout=PATIENCE)
        with visit(browser, url, DESKTOP, "light") as page:
            save_screenshot(page, PICTURES / "page-first.png")
            page.get_by_label("Mode").evaluate("mode => mode.value = 'triforce'")
            compare(page, "32,000")
            save_screenshot(page, PICTURES / "page-result.png", full_page=True)
        with visit(browser, url, DESKTOP, "dark") as page:
            compare(page, "1,000")
            save_screenshot(page, PICTURES / "page-short-dark.png")
        with visit(browser, url, PHONE, "dark") as page:
            compare(page, "32,000")
            save_screenshot(page, PICTURES / "page-result-phone-dark.png")
        browser.close()


if __name__ == "__main__":
    main()
