"""Documents in Chromium: files of all kinds, folders, drops, pasted text, samples, and texts that cannot fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.page_browser import CHATS, ask, attach, change_card, composer, drop, expect
from tests.helpers.pdf_files import pdf

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

TEXT = "the cat sat on the mat " * 20


def chips(page: Page) -> Locator:
    return page.locator(".composer .documents li")


def sent(page: Page, question: str) -> str:
    """Ask, and return the content of the last message that was sent."""
    with page.expect_request(CHATS) as request:
        ask(page, question)
    content: str = request.value.post_data_json["messages"][-1]["content"]
    return content


def test_browser_document_leads_the_question(page: Page, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    attach(page, tmp_path / "book.txt")
    expect(chips(page)).to_contain_text("book.txt")
    assert sent(page, "what sat?") == f"{TEXT}\n\nwhat sat?"
    expect(chips(page)).to_have_count(0)
    assert sent(page, "and then?") == "and then?"  # the document is read once, and stays in the history
    page.locator(".question").first.get_by_role("button", name="book.txt").click()
    expect(page.locator("dialog pre")).to_have_text(TEXT)


def test_browser_several_documents_are_told_apart(page: Page, tmp_path: Path) -> None:
    for name in ("a.md", "b.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    attach(page, tmp_path / "a.md", tmp_path / "b.txt")
    expect(chips(page)).to_have_count(2)
    assert sent(page, "q") == "--- a.md ---\ntext of a.md\n--- b.txt ---\ntext of b.txt\n\n\nq"


def test_browser_folder_is_one_document(page: Page, tmp_path: Path) -> None:
    for name, data in {"a.py": b"a = 1", "sub/b.py": b"b = 2", "c.png": b"\x89PNG\r\n", ".git/x": b"hidden"}.items():
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_bytes(data)
    page.locator("#folder").set_input_files(tmp_path / "code")
    expect(chips(page)).to_contain_text("code")
    page.get_by_role("button", name="code").first.click()
    expect(page.locator("dialog")).to_contain_text("2 files, 1 skipped, as they are not text: code/c.png")
    expect(page.locator("dialog pre")).to_have_text("--- code/a.py ---\na = 1\n--- code/sub/b.py ---\nb = 2\n")


@pytest.mark.parametrize("selector", ["body", ".side", "#composer", ".top"])
def test_browser_whole_page_takes_drops(page: Page, selector: str) -> None:
    drop(page, {"cat.txt": "the dropped cat", "dog.txt": "the dropped dog"}, selector)
    expect(chips(page)).to_have_count(2)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("naïve café".encode("latin-1"), "naïve café"),
        ("“quoted” \u2013 dash".encode("cp1252"), "“quoted” \u2013 dash"),
        ("größer".encode(), "größer"),
        ("﻿bom".encode(), "bom"),
        ("weiß".encode("utf-16"), "weiß"),
        ("weiß".encode("utf-16-be"), None),
        (pdf(["The first page.", "The second page."]), "The first page.\n\nThe second page."),
    ],
)
def test_browser_files_are_read_by_what_they_are(page: Page, data: bytes, text: str | None) -> None:
    attach(page, {"name": "file.bin", "mimeType": "application/octet-stream", "buffer": data})
    if text is None:
        expect(page.locator(".composer .fault")).to_contain_text("file.bin is no text")
        return
    expect(chips(page)).to_have_count(1)
    page.get_by_role("button", name="file.bin").first.click()
    expect(page.locator("dialog pre")).to_have_text(text)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "a.png",
            b"\x89PNG\r\n\x1a\n" + bytes(100),
            "a.png is a PNG picture: the model reads text and the text of PDF",
        ),
        ("a.docx", b"PK\x03\x04" + bytes(100), "a.docx is a ZIP archive or an Office file"),
        ("a.txt", b"text\0text", "a.txt is no text"),
        ("a.txt", b"", "a.txt is empty."),
        ("a.pdf", b"%PDF-1.4\nnothing here", "a.pdf is no valid PDF file."),
        ("a.pdf", pdf([""]), "a.pdf has no text that can be read: its pages may be pictures."),
        ("<img src=x onerror=alert(1)>.txt", b"\0", "<img src=x onerror=alert(1)>.txt is no text"),
    ],
)
def test_browser_unreadable_files_are_refused_by_name(page: Page, name: str, data: bytes, message: str) -> None:
    composer(page).fill("my own question")
    attach(page, {"name": name, "mimeType": "", "buffer": data})
    expect(page.locator(".composer .fault")).to_contain_text(message)
    expect(composer(page)).to_have_value("my own question")
    expect(chips(page)).to_have_count(0)


def test_browser_large_file_is_refused_before_it_is_read(page: Page, tmp_path: Path) -> None:
    with (tmp_path / "large.txt").open("wb") as file:
        file.write(b"text " * 1000)
        file.truncate(51_000_000)
    attach(page, tmp_path / "large.txt")
    expect(page.locator(".composer .fault")).to_contain_text(
        "large.txt has 51 MB. The model's context of 2,048 tokens holds about 8 KB of text."
    )


def test_browser_document_that_cannot_fit_switches_the_run_off(page: Page) -> None:
    drop(page, {"long.txt": "the cat sat on the mat " * 900})
    expect(page.locator("#room")).to_contain_text("This is too long: the documents have")
    assert "fault" in (page.locator("#room").get_attribute("class") or "")
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_disabled()
    composer(page).fill("what?")
    page.keyboard.press("Enter")
    assert page.locator(".question").count() == 0
    page.get_by_label("Remove long.txt").click()
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_enabled()


def test_browser_removal_is_undone(page: Page) -> None:
    composer(page).fill("about both")
    drop(page, {"a.txt": "first", "b.txt": "second"})
    expect(chips(page)).to_have_count(2)
    page.get_by_label("Remove a.txt").click()
    expect(chips(page)).to_have_count(1)
    page.get_by_role("button", name="Undo").click()
    expect(chips(page)).to_have_count(2)
    expect(composer(page)).to_have_value("about both")


def test_browser_sample_adds_to_the_draft(page: Page) -> None:
    """A sample takes nothing away: what the visitor wrote stays."""
    change_card(page, {"max_model_len": 8192})
    composer(page).fill("my own question")
    page.get_by_role("button", name="1,000", exact=True).click()
    expect(chips(page)).to_contain_text("Dracula")
    expect(composer(page)).to_have_value("my own question")


def test_browser_long_paste_becomes_a_document(page: Page) -> None:
    paste = """text => {
        const carried = new DataTransfer();
        carried.setData("text/plain", text);
        const how = {clipboardData: carried, bubbles: true, cancelable: true};
        document.getElementById("composer").dispatchEvent(new ClipboardEvent("paste", how));
    }"""
    page.evaluate(paste, "the cat sat. " * 400)
    expect(chips(page)).to_contain_text("Pasted text")
    expect(composer(page)).to_have_value("")


def test_browser_pdf_reader_comes_with_the_first_pdf(page: Page) -> None:
    loaded: list[str] = []
    page.context.on("request", lambda request: loaded.append(request.url))
    drop(page, {"a.txt": "text"})
    expect(chips(page)).to_have_count(1)
    assert not [address for address in loaded if address.endswith(".js")]
    attach(page, {"name": "b.pdf", "mimeType": "application/pdf", "buffer": pdf(["words"])})
    expect(chips(page)).to_have_count(2)
    assert [address.rsplit("/", 1)[1] for address in loaded if address.endswith(".js")] == ["pdf.js"]


def test_browser_missing_document_is_told(page: Page) -> None:
    drop(page, {"a.txt": "text"})
    expect(chips(page)).to_have_count(1)
    page.evaluate(
        """() => new Promise(resolve => {
            indexedDB.open("triforce").onsuccess = ({target}) => {
                const kept = target.result.transaction("documents", "readwrite");
                kept.objectStore("documents").clear();
                kept.oncomplete = () => { target.result.close(); resolve(); };
            };
        })"""
    )
    answer = ask(page, "what?")
    expect(answer.locator(".fault")).to_contain_text("The document a.txt is no longer in this browser's storage.")


def test_browser_watched_documents_are_offered(page: Page) -> None:
    def listed(route: Any) -> None:
        route.fulfill(json={"documents": [{"id": "one", "name": "notes"}]})

    page.route("**/documents", listed)
    page.route("**/documents/one", lambda route: route.fulfill(body="text of the notes", content_type="text/plain"))
    page.reload()
    page.get_by_role("button", name="notes").click()
    expect(chips(page)).to_contain_text("notes")
    assert sent(page, "q") == "text of the notes\n\nq"
