"""The page in Firefox: a conversation, a check, the renderer, a PDF file, and what is kept over a reload."""

from __future__ import annotations

import json
import shutil
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.firefox import Firefox, firefox
from tests.helpers.pdf_files import pdf
from tests.helpers.server_process import KEY

ENTER = "\ue007"
CHECK_BUTTON = "[...document.querySelectorAll('.acts button')].find(button => /^Check/.test(button.textContent))"


@pytest.fixture
def tab(tmp_path: Path, url: str) -> Iterator[Firefox]:
    pytest.importorskip("websockets", reason="websockets is not installed")
    program = shutil.which("firefox") or shutil.which("firefox-esr")
    if not program:
        pytest.skip("no Firefox here")
    (tmp_path / "profile").mkdir()
    with firefox(program, tmp_path / "profile") as opened:
        opened.open(url)
        opened.wait("document.querySelector('#key') !== null")
        opened.type("#key", KEY, ENTER)
        opened.wait("document.querySelector('#about').textContent.includes('2,048 tokens of context')")
        yield opened
        # Firefox reports the answer 401 that the page has told the visitor.
        assert [line for line in opened.errors if "401" not in line] == []


def test_firefox_converses_and_checks(tab: Firefox) -> None:
    settings = json.dumps({"max_tokens": "16", "temperature": "0"})
    tab.run(f"localStorage.setItem('triforce.settings', {json.dumps(settings)})")
    tab.reload()
    tab.wait("document.querySelector('#about').textContent.includes('tokens of context')")
    tab.type("#composer", "the cat", ENTER)
    tab.wait("document.querySelector('.ending') !== null")
    tab.wait("document.querySelector('.answer .markdown') !== null")  # its policy lets the renderer run
    tab.wait(f"({CHECK_BUTTON})?.disabled === false")
    tab.run(f"{CHECK_BUTTON}.click()")
    headline = tab.wait("document.querySelector('.headline')?.textContent")
    assert headline.startswith("Identical to plain decoding")
    tab.reload()
    assert tab.wait("document.querySelector('.headline')?.textContent") == headline
    tab.wait("document.querySelector('.answer .markdown') !== null")
    math = r"triforceRenderer.blocks('$x^2$').map(block => block.html).join('')"
    assert "<math" in tab.run(math)


def test_firefox_reads_a_pdf_file(tab: Firefox) -> None:
    data = b64encode(pdf(["The only page."])).decode()
    tab.run(
        f"""(() => {{
            const bytes = Uint8Array.from(atob("{data}"), letter => letter.charCodeAt(0)), carried = new DataTransfer();
            carried.items.add(new File([bytes], "one.pdf"));
            const drop = new DragEvent("drop", {{dataTransfer: carried, bubbles: true, cancelable: true}});
            document.body.dispatchEvent(drop);
        }})()"""
    )
    chip = tab.wait("document.querySelector('.composer .documents, .composer .fault')?.textContent")
    assert chip.startswith("one.pdf")
    tab.run("document.querySelector('.composer .documents button').click()")
    assert tab.wait("document.querySelector('dialog pre')?.textContent") == "The only page."
