"""Take the screenshots of the documentation, of photographs and of the built-in glyphs.

    python docs/pictures.py              trains the demo first, for some minutes
    python docs/pictures.py runs/demo-1  uses a finished demo

They are written to docs/pictures/. Needs the extra ``dev``, and chromium.
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

import numpy as np
import skimage.data
from PIL import Image
from playwright.sync_api import Locator, Page, sync_playwright

from proximetry import Run, check
from proximetry.models import Embedder
from proximetry.search import contact_sheet, index

PICTURES = Path(__file__).parent / "pictures"
WIDE = {"width": 1100, "height": 760}
#: Photographs in scikit-image that are in the public domain or under CC0.
PHOTOS = (
    "astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "grass.png",
    "gravel.png", "hubble_deep_field.jpg", "retina.jpg", "rocket.jpg",
)  # fmt: skip
PARTS = {
    "calibration": "#calibration",
    "metrics": "#metrics",
    "curves": "#curves",
    "queries": "#queries",
    "map": "#map svg >> nth=0",
}
LARGEST = 150_000
"""Bytes of a picture."""


def main() -> None:
    """Take all screenshots."""
    parser = argparse.ArgumentParser(description="Take the screenshots of the documentation.")
    parser.add_argument("run", nargs="?", type=Path, help="folder of a demo; else one is trained")
    run = parser.parse_args().run
    with tempfile.TemporaryDirectory() as folder:
        if run is None:
            run = Path(folder) / "run"
            command = [sys.executable, "-m", "proximetry", "demo", "--out", str(run)]
            subprocess.run(command, check=True)
        photos = Path(folder) / "photos"
        queries = make_crops(photos)
        gallery = index(photos, Path(folder) / "gallery")
        explain(gallery.embedder)
        with browser() as page:
            contact_sheet(Path(folder) / "sheet.html", queries, gallery.search(queries, k=5))
            page.goto((Path(folder) / "sheet.html").as_uri())
            save("neighbors", clip(page, page.locator("body")))
            health(page, photos, Path(folder))
            report(page, run / "report.html")
            extended_run(page, run, photos, Path(folder))
            with served(gallery.path) as address:
                search_page(page, address, queries[0])
            with served(run / "gallery") as address:
                search_map(page, address)


def make_crops(folder: Path, count: int = 12) -> list[Path]:
    """Write crops of the photographs, a folder for each; return more crops, as queries."""
    draw, queries = np.random.default_rng(0), []
    for name in PHOTOS:
        photo = Image.open(Path(skimage.data.__file__).parent / name).convert("RGB")
        target = folder / Path(name).stem
        target.mkdir(parents=True)
        for number in range(count):
            random_crop(photo, draw).save(target / f"{number:02d}.jpg", quality=92)
        if name in ("chelsea.png", "coffee.png", "rocket.jpg"):
            queries.append(folder.parent / f"query-{target.name}.jpg")
            random_crop(photo, draw).save(queries[-1], quality=92)
    return queries


def random_crop(photo: Image.Image, draw: np.random.Generator) -> Image.Image:
    """Return a square of 55 to 85 % of the shorter side."""
    side = int(min(photo.size) * draw.uniform(0.55, 0.85))
    left, top = (int(draw.integers(0, length - side + 1)) for length in photo.size)
    return photo.crop((left, top, left + side, top + side)).resize((320, 320))


def explain(embedder: Embedder) -> None:
    """Draw why an astronaut, in front of a model of a shuttle, is similar to a rocket."""
    crops = {"astronaut.png": (200, 0, 512, 312), "rocket.jpg": (100, 0, 500, 400)}
    photos = Path(skimage.data.__file__).parent
    a, b = (Image.open(photos / name).convert("RGB").crop(box) for name, box in crops.items())
    file = io.BytesIO()
    embedder.explain(a, b).image().save(file, "PNG")
    save("explain", file.getvalue())


def health(page: Page, photos: Path, folder: Path) -> None:
    """Take a screenshot of the health of the photographs with a few problems."""
    problems = folder / "problems"
    shutil.copytree(photos, problems)
    Image.open(problems / "coffee/03.jpg").transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(
        problems / "rocket/coffee.jpg"
    )
    (problems / "chelsea/05.jpg").rename(problems / "astronaut/cat.jpg")
    check(problems).page(folder / "health.html")
    page.goto((folder / "health.html").as_uri())
    save("check", clip(page, page.locator("#labels")))


def report(page: Page, file: Path) -> None:
    """Take screenshots of parts of the report of the run."""
    page.goto(file.resolve().as_uri())
    for name, part in PARTS.items():
        limit = 960 if name == "calibration" else 830
        save(f"report-{name}", clip(page, page.locator(part), limit))


def extended_run(page: Page, run: Path, photos: Path, folder: Path) -> None:
    """Take a screenshot of the report of the demo, extended by classes of photographs."""
    for photo in sorted(photos.glob("*/*.jpg")):
        split = "test" if photo.stem >= "08" else "train"
        target = folder / "more" / split / photo.parent.name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(photo, target / photo.name)
    extended = Run(run).extend(folder / "more", folder / "extended", epochs=1)
    page.goto(extended.report().resolve().as_uri())
    for table in page.locator("#metrics .plots > *").all():
        if not table.inner_text().startswith("Extension"):
            table.evaluate("table => { table.hidden = true }")
    save("extend", clip(page, page.locator("#metrics .plots")))


def search_page(page: Page, address: str, query: Path) -> None:
    """Take a screenshot of ``proximetry serve`` after a search by an image."""
    page.goto(address)
    page.wait_for_selector("#grid .card")
    page.locator("input[type=file]").first.set_input_files(query)
    page.wait_for_selector("#grid .rank")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(3000)
    page.mouse.move(0, 0)
    save("search-page", page.screenshot())


def search_map(page: Page, address: str) -> None:
    """Take a screenshot of the map of a gallery."""
    page.goto(address)
    page.locator("#to-map").click()
    page.wait_for_selector("#legend button", timeout=600_000)
    page.wait_for_timeout(1500)
    save("search-map", page.screenshot())


def clip(page: Page, part: Locator, limit: int = 830) -> bytes:
    """Take a screenshot of the beginning of a part, with a margin, of limited height."""
    part.evaluate("part => part.scrollIntoView()")
    page.wait_for_timeout(1000)  # pictures are loaded when they come into view
    box = part.bounding_box()
    assert box is not None
    left, top = max(0, box["x"] - 16), max(0, box["y"] + page.evaluate("scrollY") - 16)
    width, height = min(box["width"] + 32, WIDE["width"]), min(box["height"] + 32, limit)
    area = {"x": left, "y": top, "width": width, "height": height}
    return page.screenshot(full_page=True, clip=area)


@contextmanager
def browser() -> Iterator[Page]:
    """Open a browser."""
    with sync_playwright() as playwright:
        program = shutil.which("chromium")
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium.new_page(viewport=WIDE, color_scheme="light", reduced_motion="reduce")
        chromium.close()


@contextmanager
def served(gallery: Path) -> Iterator[str]:
    """Serve a gallery; yield the address."""
    command = [sys.executable, "-m", "proximetry", "serve", str(gallery), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        try:
            assert server.stdout is not None
            lines = (line.decode() for line in server.stdout)
            yield next(match[0] for line in lines if (match := re.search(r"http://\S+", line)))
        finally:
            server.terminate()


def save(name: str, picture: bytes) -> None:
    """Write a picture as WebP of at most `LARGEST` bytes."""
    PICTURES.mkdir(exist_ok=True)
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for quality in (85, 70, 55, 40):
        file = io.BytesIO()
        image.save(file, "WEBP", quality=quality, method=6)
        if len(file.getvalue()) <= LARGEST:
            break
    (PICTURES / f"{name}.webp").write_bytes(file.getvalue())
    print(f"{name}.webp: {image.width} × {image.height}, {len(file.getvalue()) // 1000} kB")


if __name__ == "__main__":
    main()
