"""A real browser, for the tests of the page: Debian's Chromium, driven by Playwright, with no network.

Four megabytes of script are compiled as a page opens, 1.2 s; once, where all pages are of one process that lives on (`ONE_PROCESS`, and a
blank page that stays), and have one address.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ONE_PROCESS = ("--disable-site-isolation-trials", "--renderer-process-limit=1")
FOLDER = tempfile.TemporaryDirectory(prefix="memopt-page-")
ADDRESS = Path(FOLDER.name, "page.html")
WIDE = {"width": 1280, "height": 900}
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        args = ["--no-sandbox", "--disable-gpu", *ONE_PROCESS]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield browser
        browser.close()


class Opened:
    """A page of ours, and all that it said and asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    @property
    def asked_others(self) -> list[str]:
        """What it asked for besides itself and what it made."""
        return [url for url in self.asked[1:] if not url.startswith(("data:", "blob:"))]

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def until(self, expression: str, seconds: float = 20.0) -> None:
        """Wait until the script `expression` is true (Playwright's own way of waiting needs an eval, which the page forbids)."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, expression
            self.page.wait_for_timeout(50)

    def go(self, path: Path, fragment: str = "") -> Opened:
        self.page.goto(f"{path.as_uri()}{fragment}")
        self.page.wait_for_selector("html[data-ready]", timeout=60_000, state="attached")
        return self


@contextmanager
def opened(
    browser: Any,
    path: Path,
    fragment: str = "",
    *,
    viewport: dict[str, int] = WIDE,
    color_scheme: str = "light",
    bypass_csp: bool = False,
) -> Iterator[Opened]:
    """`path` in a page of its own, offline; at the end it has said nothing and asked for nothing, and what it kept is forgotten."""
    page = _window(browser, bypass_csp).new_page()
    ADDRESS.symlink_to(path)
    try:
        page.set_viewport_size(viewport)
        page.emulate_media(color_scheme=color_scheme)
        found = Opened(page).go(ADDRESS, fragment)
        yield found
        page.evaluate("localStorage.clear()")
        assert found.said == []
        assert found.asked_others == []
    finally:
        ADDRESS.unlink()
        page.close()


@functools.cache
def _window(browser: Any, bypass_csp: bool) -> Any:
    context = browser.new_context(offline=True, bypass_csp=bypass_csp)
    context.new_page()
    return context
