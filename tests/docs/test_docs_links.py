"""Links of pages lead somewhere, and what pages name is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers import pages
from tests.helpers.pages import ROOT

HOMES = (ROOT, ROOT / "src" / "triforce", ROOT / "docs")
ALL = [*pages.pages(), ROOT / "llms.txt"]


def broken(page: Path, text: str) -> list[str]:
    """Return links of a page that lead nowhere, of those within the repository."""
    faults = []
    for link in pages.links(text):
        target, _, anchor = link.partition("#")
        if re.match(r"https?://", link):
            continue
        file = (page.parent / target).resolve() if target else page
        resolves = file.exists() and (not anchor or anchor in pages.anchors(file.read_text(encoding="utf-8")))
        if not resolves:
            faults.append(link)
    return faults


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_page_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert broken(page, text) == []
    outside = [link for link in pages.links(text) if link.startswith("..") and ROOT / "docs" in page.parents]
    assert [x for x in outside if not (page.parent / x.split("#")[0]).resolve().is_relative_to(ROOT / "docs")] == []


@pytest.mark.parametrize("link", ["nowhere.md", "README.md#nowhere", "#nowhere"])
def test_broken_link_is_found(link: str) -> None:
    assert broken(ROOT / "README.md", f"[x]({link})") == [link]
    assert broken(ROOT / "README.md", "[x](README.md#from-python) [y](https://example.org)") == []


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_page_names_exist(page: Path) -> None:
    named = pages.files(page.read_text(encoding="utf-8"))
    assert {name for name in named if not any((home / name).exists() for home in HOMES)} == set()


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_of_list_or_row_are_named_once(page: Path) -> None:
    assert pages.repeated_files(page.read_text(encoding="utf-8")) == set()


def test_missing_folder_and_repeated_file_are_found() -> None:
    assert pages.files("`merges/` `checkpoint/families/` `build/site/`") == {"checkpoint/families/"}
    for line in ("**Files.** `a/b.py`, `a/b.py`, `a/c.py`.", "| costs | `a/b.py`, `a/c.py`, `a/b.py` |"):
        assert pages.repeated_files(line) == {"a/b.py"}
    assert pages.repeated_files("`a/b.py` and `a/b.py`\n| `a/b.py` |\n| `a/b.py` |") == set()


def test_pages_are_all_in_the_site() -> None:
    def files(nav: object) -> list[str]:
        if isinstance(nav, str):
            return [nav]
        return [file for entry in nav for file in files(entry)] if isinstance(nav, list) else files([*nav.values()])  # type: ignore[attr-defined]

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = files(config["nav"])
    pages_there = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(pages_there)


def test_site_is_built_without_the_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    html = (tmp_path / "concepts" / "tiers.html").read_text(encoding="utf-8")
    assert re.findall(r'(?:src|<link[^>]*href)="(?:https?:)?//[^"]*"', html) == []
    assert (tmp_path / "pictures" / "tiers.svg").exists()
