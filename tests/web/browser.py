"""Visits to the page in a real browser."""

import shutil
import time

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: apt-get install chromium"
)


class Visit:
    """A visit to the page; the console stays empty and no other host is contacted."""

    def __init__(self, browser, url, **options):
        options = {
            "viewport": {"width": 1200, "height": 860},
            "reduced_motion": "reduce",
            **options,
        }
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(30_000)
        self.page = self.context.new_page()
        self.url, self.console, self.foreign = url, [], []
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", self._note)
        self.page.goto(url)
        self.page.wait_for_selector("#grid .card")

    def _note(self, request):
        home = self.url.partition("?")[0]
        if not request.url.startswith((home, "blob:" + home)):
            self.foreign.append(request.url)

    def end(self):
        self.context.close()
        assert self.console == [], self.console
        assert self.foreign == []


def until(page, script):
    """Wait for a condition; Playwright's wait_for_function violates the CSP."""
    end = time.monotonic() + 60
    while not page.evaluate(script):
        assert time.monotonic() < end, script
        page.wait_for_timeout(20)


def ranks(page):
    page.wait_for_selector("#grid:not([aria-busy])")
    page.wait_for_selector("#grid .rank")
    return page.locator("#grid .rank").all_inner_texts()


def transfer(page, name, kind, content):
    return page.evaluate_handle(
        """([name, kind, bytes]) => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], name, {type: kind}));
            return data;
        }""",
        [name, kind, list(content)],
    )


def give(page, way, content, name="mine.png", kind="image/png"):
    if way == "pick":
        page.set_input_files("#file", {"name": name, "mimeType": kind, "buffer": content})
    elif way == "drop":
        data = transfer(page, name, kind, content)
        page.dispatch_event("body", "dragenter", {"dataTransfer": data})
        assert page.locator("#overlay").is_visible()
        page.dispatch_event("#drop", "drop", {"dataTransfer": data})
        assert not page.locator("#overlay").is_visible()
    else:
        page.evaluate(
            """data => document.body.dispatchEvent(
                new ClipboardEvent("paste", {clipboardData: data, bubbles: true}))""",
            transfer(page, name, kind, content),
        )
