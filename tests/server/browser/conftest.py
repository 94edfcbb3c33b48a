"""Chromium, a server, and its page."""

from tests.helpers import page_browser

browser, url = page_browser.browser, page_browser.url  # fixtures
locked_page, page = page_browser.locked_page, page_browser.page
