"""Conversations in the browser's storage, in Chromium: kept, renamed, exported, imported, deleted, or not kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.page_browser import (
    answer_with,
    ask,
    check,
    composer,
    drop,
    expect,
    finish,
    hold_streams,
    piece,
    send,
    set_settings,
    unlock,
    usage,
)

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def titles(page: Page) -> Locator:
    return page.locator(".side .title")


def new(page: Page) -> None:
    page.get_by_role("button", name="New conversation").click()


def beside(page: Page, url: str) -> Page:
    """Return a second tab of the same visitor, with the key."""
    second_tab = page.context.new_page()
    second_tab.goto(url)
    unlock(second_tab)
    return second_tab


def keep(page: Page, on: bool) -> None:
    """Choose in the settings whether conversations are kept."""
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Keep conversations in this browser").set_checked(on)
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def exported(page: Page, folder: Path) -> Path:
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    file = folder / download.value.suggested_filename
    download.value.save_as(file)
    return file


def test_browser_conversations_are_listed_and_opened(page: Page) -> None:
    ask(page, "the first question")
    new(page)
    assert page.evaluate("document.activeElement.id") == "composer"
    ask(page, "the second question")
    expect(titles(page)).to_have_text(["the second question", "the first question"])
    titles(page).nth(1).click()
    expect(page.locator(".question .plain")).to_have_text("the first question")
    page.go_back()
    expect(page.locator(".question .plain")).to_have_text("the second question")
    page.reload()
    expect(page.locator(".question .plain")).to_have_text("the second question")
    expect(titles(page)).to_have_count(2)


def test_browser_answer_goes_on_behind_another_conversation(page: Page) -> None:
    hold_streams(page, 8)
    send(page, "a slow question")
    expect(page.locator(".figures")).to_be_visible()
    new(page)
    expect(page.locator(".side")).to_contain_text("is answering")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    titles(page).first.click()
    expect(page.locator(".figures")).to_be_visible()
    expect(page.locator(".going")).to_be_visible()
    new(page)
    page.get_by_role("button", name="Stop").click()
    titles(page).first.click()
    expect(page.locator(".ending")).to_have_text("You stopped this answer.")


def test_browser_running_conversation_is_deleted_for_good(page: Page) -> None:
    hold_streams(page, 8)
    send(page, "a slow question")
    expect(page.locator(".figures")).to_be_visible()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(titles(page)).to_have_count(0)
    page.wait_for_timeout(800)  # longer than the pause of saving
    page.reload()
    expect(titles(page)).to_have_count(0)


def test_browser_draft_is_kept(page: Page) -> None:
    composer(page).fill("half a question")
    drop(page, {"book.txt": "the cat"})
    expect(page.locator(".composer .documents li")).to_have_count(1)
    page.reload()
    expect(composer(page)).to_have_value("half a question")
    expect(page.locator(".composer .documents li")).to_have_count(1)
    expect(titles(page)).to_have_text("Draft: half a question")


def test_browser_conversation_is_renamed(page: Page) -> None:
    ask(page, "the cat")
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("New name").fill("<b>Cats</b>")
    page.keyboard.press("Enter")
    expect(titles(page)).to_have_text("<b>Cats</b>")
    page.reload()
    expect(titles(page)).to_have_text("<b>Cats</b>")


def test_browser_deletion_is_undone(page: Page) -> None:
    drop(page, {"book.txt": "the cat"})
    expect(page.locator(".composer .documents li")).to_have_count(1)
    ask(page, "what?")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(titles(page)).to_have_count(0)
    expect(page.locator(".question")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".question .plain")).to_have_text("what?")
    page.locator(".question").get_by_role("button", name="book.txt").click()
    expect(page.locator("dialog pre")).to_have_text("the cat")


def test_browser_deletion_leaves_nothing(page: Page) -> None:
    ask(page, "what?")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(titles(page)).to_have_count(0)
    count = """() => new Promise(resolve => {
        indexedDB.open("triforce").onsuccess = async ({target}) => {
            const names = [...target.result.objectStoreNames];
            const counts = await Promise.all(names.map(name => new Promise(done => {
                const counting = target.result.transaction(name).objectStore(name).count();
                counting.onsuccess = () => done(counting.result);
            })));
            target.result.close();
            resolve(counts);
        };
    })"""
    assert page.evaluate(count) == [0, 0, 0, 0]


def test_browser_export_and_import_round_trip(page: Page, tmp_path: Path) -> None:
    """An imported conversation is asked on and checked like the one that was exported."""
    drop(page, {"book.txt": "the cat sat on the mat"})
    expect(page.locator(".composer .documents li")).to_have_count(1)
    ask(page, "what sat?")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".branches")).to_contain_text("2 of 2")
    expect(page.locator(".ending")).to_have_count(1)
    text = page.locator(".answer .markdown").inner_text()
    file = exported(page, tmp_path)
    assert file.name == "what-sat.json"
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator("#import").set_input_files(file)
    expect(page.locator(".answer .markdown")).to_have_text(text)
    expect(page.locator(".branches")).to_contain_text("2 of 2")
    check(page.locator(".answer"))
    expect(page.locator(".headline")).to_contain_text("Identical to plain decoding")
    page.locator("#import").set_input_files(file)
    expect(titles(page)).to_have_count(2)
    assert sorted(titles(page).all_inner_texts()) == ["what sat?", "what sat? (imported)"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: "no JSON", "bad.json is no exported conversation, as it is no JSON."),
        (lambda data: {"format": "other"}, "its format is not triforce-conversation"),
        (lambda data: data | {"version": 9}, "its version is not 1"),
        (lambda data: data | {"turns": "x"}, "turns is no list"),
        (lambda data: data | {"turns": [data["turns"][0] | {"parent": "nobody"}]}, "a turn's parent is missing"),
        (lambda data: data | {"turns": [data["turns"][0] | {"parent": data["turns"][0]["id"]}]}, "in a circle"),
        (lambda data: data | {"turns": [data["turns"][0]] * 2}, "two turns have one id"),
        (lambda data: data | {"turns": [data["turns"][0] | {"role": "root"}]}, "a turn has no known role"),
        (lambda data: data | {"turns": [None]}, "a turn's id is no text"),
        (lambda data: data | {"conversation": {}}, "its id is no text"),
    ],
)
def test_browser_bad_import_is_refused(page: Page, tmp_path: Path, change: Any, message: str) -> None:
    ask(page, "the cat")
    changed = change(json.loads(exported(page, tmp_path).read_text()))
    (tmp_path / "bad.json").write_text(changed if isinstance(changed, str) else json.dumps(changed))
    page.locator("#import").set_input_files(tmp_path / "bad.json")
    expect(page.locator(".side .fault")).to_contain_text(message)
    expect(titles(page)).to_have_count(1)
    expect(page.locator(".question .plain")).to_have_text("the cat")


def test_browser_switch_keeps_nothing(page: Page) -> None:
    keep(page, False)
    expect(page.locator(".side")).to_contain_text("Conversations are not kept")
    answer_with(page, [piece("kept nowhere"), finish(), usage(20)])
    ask(page, "a secret question")
    expect(titles(page)).to_have_text("a secret question")
    asked_first = []
    page.once("dialog", lambda dialog: (asked_first.append(dialog.type), dialog.accept()))
    page.reload()
    expect(titles(page)).to_have_count(0)
    assert asked_first == ["beforeunload"]
    bases = page.evaluate("indexedDB.databases().then(all => all.length)")
    assert bases in (0, 1) and "secret" not in page.evaluate("JSON.stringify({...localStorage, ...sessionStorage})")


def test_browser_switch_covers_what_was_kept_before(page: Page) -> None:
    """Kept conversations stay open to questions while nothing new is kept, and are kept again with the switch."""
    drop(page, {"book.txt": "the cat"})
    expect(page.locator(".composer .documents li")).to_have_count(1)
    ask(page, "one")
    keep(page, False)
    ask(page, "two")
    new(page)
    titles(page).first.click()
    expect(page.locator(".question .plain")).to_have_text(["one", "two"])
    check(page.locator(".answer").first)
    keep(page, True)
    ask(page, "three")
    page.reload()
    expect(page.locator(".question .plain")).to_have_text(["one", "two", "three"])
    keep(page, False)
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(titles(page)).to_have_count(0)
    page.reload()
    expect(titles(page)).to_have_count(0)


def test_browser_deletion_reaches_other_tabs(page: Page, url: str) -> None:
    ask(page, "from the first tab")
    second_tab = beside(page, url)
    titles(second_tab).first.click()
    expect(second_tab.locator(".question")).to_have_count(1)
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(second_tab.locator(".question")).to_have_count(0)
    expect(titles(second_tab)).to_have_count(0)
    second_tab.close()


def test_browser_tabs_keep_each_others_changes(page: Page, url: str) -> None:
    """A system prompt of one tab outlasts an answer of another."""
    ask(page, "one")
    second_tab = beside(page, url)
    titles(second_tab).first.click()
    expect(second_tab.locator(".question")).to_have_count(1)
    hold_streams(page, 3)
    send(page, "two")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    set_settings(second_tab, system="be brief")
    second_tab.wait_for_timeout(800)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".system")).to_contain_text("be brief")
    page.reload()
    expect(page.locator(".system")).to_contain_text("be brief")
    expect(page.locator(".question .plain")).to_have_text(["one", "two"])
    second_tab.close()


def test_browser_all_conversations_are_deleted(page: Page) -> None:
    ask(page, "one")
    new(page)
    ask(page, "two")
    page.get_by_role("button", name="Settings").click()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete all conversations").click()
    expect(titles(page)).to_have_count(0)
    page.reload()
    expect(titles(page)).to_have_count(0)


def test_browser_tabs_see_each_other(page: Page, url: str) -> None:
    ask(page, "from the first tab")
    second_tab = beside(page, url)
    expect(titles(second_tab)).to_have_text("from the first tab")
    titles(second_tab).first.click()
    ask(page, "a second question")
    expect(second_tab.locator(".question .plain")).to_have_text(["from the first tab", "a second question"])
    second_tab.close()


def test_browser_without_storage_says_so(page: Page) -> None:
    page.add_init_script("IDBFactory.prototype.open = () => { throw new DOMException('refused', 'SecurityError'); };")
    page.reload()
    expect(page.locator(".top")).to_contain_text("This browser keeps nothing for this page")
    ask(page, "the cat")
    ask(page, "and the dog")
    expect(page.locator(".question")).to_have_count(2)


def test_browser_full_storage_says_so(page: Page) -> None:
    page.evaluate(
        "() => { IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); }; }"
    )
    ask(page, "the cat")
    ask(page, "and the dog")
    expect(page.locator(".top")).to_contain_text("The browser's storage is full")
    expect(page.locator(".question")).to_have_count(2)
    check(page.locator(".answer").first)
