"""Pictures of the playground for the README: python scripts/page_pictures.py. Needs playwright and Chromium."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
BOOK = ROOT / "src" / "triforce" / "data" / "dracula.txt"
CHARACTERS = 40_000
SHOTS = {"light": (1000, 900), "dark": (390, 844)}
"""Color scheme: width and height. The dark one is a phone."""


def play(page: Page, url: str) -> None:
    """A beginning of the book is continued, then again by plain decoding."""
    page.goto(url)
    book = BOOK.read_text(encoding="utf-8")
    page.get_by_label("Document").fill(book[: book.rindex(" ", 0, CHARACTERS)])
    page.get_by_label("Tokens at most").fill("160")
    page.get_by_label("Then the same seed").check()
    expect(page.locator("#size")).to_contain_text("of", timeout=60_000)
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#status")).to_contain_text("Done: with tiers", timeout=300_000)


def main() -> None:
    command = [sys.executable, "-m", "triforce", "serve", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout
    try:
        url = server.stdout.readline().split()[-1]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for scheme, (width, height) in SHOTS.items():
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                play(page, url)
                if scheme == "dark":
                    page.evaluate("document.getElementById('status').scrollIntoView()")
                page.screenshot(path=ROOT / "docs" / "pictures" / f"page-{scheme}.png", full_page=scheme == "light")
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
