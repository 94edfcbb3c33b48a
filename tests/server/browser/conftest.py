"""Chromium, a server, and its page."""

from tests.helpers import playground_page

browser, url, page = playground_page.browser, playground_page.url, playground_page.page  # fixtures
