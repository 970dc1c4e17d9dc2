"""Take the screenshots of the documentation: what the software makes of the built-in glyphs.

    python docs/pictures.py              trains the demo first, for some minutes
    python docs/pictures.py runs/demo-1  takes a demo that is there

They go to docs/pictures/. Needs the extra ``dev``, and chromium for what a browser shows.
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, Page, sync_playwright

from proximetry.search import Gallery, contact_sheet

PICTURES = Path(__file__).parent / "pictures"
WIDE = {"width": 1100, "height": 760}
PARTS = {
    "metrics": "#metrics",
    "curves": "#curves",
    "queries": "#queries",
    "map": "#map svg >> nth=0",
}
LARGEST = 150_000
"""Bytes of a picture, so that a clone stays small."""


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description="Take the screenshots of the documentation.")
    parser.add_argument("run", nargs="?", type=Path, help="folder of a demo; else one is trained")
    run = parser.parse_args().run
    with tempfile.TemporaryDirectory() as folder:
        if run is None:
            run = Path(folder) / "run"
            command = [sys.executable, "-m", "proximetry", "demo", "--out", str(run)]
            subprocess.run(command, check=True)
        with browser() as page:
            neighbours(page, run / "gallery", Path(folder) / "sheet.html")
            report(page, run / "report.html")
            with served(run / "gallery") as address:
                search_page(page, address)


def neighbours(page: Page, place: Path, sheet: Path) -> None:
    """Photograph the sheet that ``proximetry search --sheet`` writes."""
    gallery = Gallery.open(place)
    found = [gallery.ids({"label": label})[0] for label in ("%", "6", "r")]
    queries = list(gallery.rows(found)["path"])
    contact_sheet(sheet, queries, gallery.search(queries, k=5))
    page.goto(sheet.as_uri())
    keep("neighbours", cut(page, page.locator("body")))


def report(page: Page, file: Path) -> None:
    """Photograph parts of the report of the run."""
    page.goto(file.resolve().as_uri())
    for name, part in PARTS.items():
        keep(f"report-{name}", cut(page, page.locator(part)))


def search_page(page: Page, address: str) -> None:
    """Photograph the page of ``proximetry serve``: a search, and the map."""
    page.goto(address)
    for card in (3, 1):  # the first search also loads the model
        page.locator("#grid .card").nth(card).locator("img").click()
        page.wait_for_selector("#preview:not([hidden])")
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(1500)
    page.mouse.move(0, 0)
    keep("search-page", page.screenshot())
    page.locator("#to-map").click()
    page.wait_for_selector("#map-waiting", state="hidden", timeout=600_000)
    page.wait_for_timeout(1500)
    keep("search-map", page.screenshot())


def cut(page: Page, part: Locator) -> bytes:
    """Photograph the beginning of a part, with a margin."""
    part.evaluate("part => part.scrollIntoView()")
    page.wait_for_timeout(1000)  # pictures are loaded when they come into view
    box = part.bounding_box()
    assert box is not None
    left, top = max(0, box["x"] - 16), max(0, box["y"] + page.evaluate("scrollY") - 16)
    width, height = min(box["width"] + 32, WIDE["width"]), min(box["height"] + 32, 830)
    clip = {"x": left, "y": top, "width": width, "height": height}
    return page.screenshot(full_page=True, clip=clip)


@contextmanager
def browser() -> Iterator[Page]:
    """Open a browser."""
    with sync_playwright() as playwright:
        program = shutil.which("chromium")
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found.new_page(viewport=WIDE, color_scheme="light", reduced_motion="reduce")
        found.close()


@contextmanager
def served(gallery: Path) -> Iterator[str]:
    """Serve a gallery, and give the address."""
    command = [sys.executable, "-m", "proximetry", "serve", str(gallery), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        try:
            assert server.stdout is not None
            lines = (line.decode() for line in server.stdout)
            yield next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
        finally:
            server.terminate()


def keep(name: str, picture: bytes) -> None:
    """Write a picture as WebP, as well as its size allows."""
    PICTURES.mkdir(exist_ok=True)
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for quality in (85, 70, 55, 40):
        found = io.BytesIO()
        image.save(found, "WEBP", quality=quality, method=6)
        if len(found.getvalue()) <= LARGEST:
            break
    (PICTURES / f"{name}.webp").write_bytes(found.getvalue())
    print(f"{name}.webp: {image.width} × {image.height}, {len(found.getvalue()) // 1000} kB")


if __name__ == "__main__":
    main()
