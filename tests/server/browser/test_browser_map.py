"""The map of the retrieval tier's visible tokens, in Chromium."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

from tests.helpers.playground_page import answer, compare, expect, headline, read, told


def test_browser_map_shows_retrieved_pages(page: Page) -> None:
    compare(page)
    headline(page, "the same text$")
    label = page.locator("#map").get_attribute("aria-label") or ""
    (percent,) = re.findall(r"see (\d+) %", label)
    assert 0 < int(percent) < 40
    painted = pixels(page)
    assert 0 < sum(alpha > 0 for *_, alpha in painted) < 256 and painted[0][3] and painted[-1][3]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_map_darkens_with_count(page: Page, scheme: Any) -> None:
    """The map's ink contrasts with its ground, in the light and the dark scheme."""
    page.emulate_media(color_scheme=scheme)
    answer(page, [told("twenty tokens of text", seen=(0, 30, 100)), read(9000)])
    compare(page)
    headline(page, "the same text$")
    colors = page.evaluate(
        """() => ["color", "backgroundColor"].map(name => getComputedStyle(document.getElementById("map"))[name])"""
    )
    ink, ground = ([int(n) for n in re.findall(r"\d+", color)] for color in colors)
    no_pixels = pixels(page)[10]
    some_pixels = pixels(page)[120]
    all_of_it = pixels(page)[250]
    assert no_pixels[3] == 0 and 0 < some_pixels[3] < all_of_it[3] == 255 and all_of_it[:3] == ink
    assert sum(abs(a - b) for a, b in zip(ink, ground, strict=True)) > 200
    ramp = page.locator(".ramp").evaluate("e => getComputedStyle(e).backgroundImage")
    assert ramp == f"linear-gradient(to right, {colors[1]}, {colors[0]})"
    assert page.locator(".key").inner_text().split("\n")[0] == "no head"
    assert not re.search("dark|light", page.locator("#map-note").inner_text(), re.I)


@pytest.mark.parametrize(
    ("visible", "message"),
    [((), "was not used"), ((100, 100), "The retrieval tier read the whole text"), ((0, 100), "")],
)
def test_browser_map_is_absent_without_retrieval(page: Page, visible: tuple[int, ...], message: str) -> None:
    answer(page, [told("twenty tokens of text", seen=visible), read(9000)])
    compare(page)
    headline(page, "the same text$")
    expect(page.locator("#map-none")).to_contain_text(message)
    assert page.locator("#map").is_visible() == (not message)


def pixels(page: Page) -> list[list[int]]:
    """Return the pixels of the latest line of the map."""
    line: Any = page.eval_on_selector("#map", "c => [...c.getContext('2d').getImageData(0, 47, 256, 1).data]")
    return [line[i : i + 4] for i in range(0, len(line), 4)]
