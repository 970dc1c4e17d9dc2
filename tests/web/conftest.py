"""A gallery of real images, its application, and a real server."""

import io
import re
import signal
import struct
import zlib
from dataclasses import replace

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from proximetry import metrics
from proximetry.data import Catalog
from proximetry.search import Gallery
from proximetry.web import gallery_map, live_gallery, make_app
from proximetry.web.middleware import AccessMiddleware
from tests.processes import Process
from tests.search.conftest import make_embedder
from tests.training.tiny import make_images
from tests.web.browser import CHROMIUM, Visit

CLASSES, EACH = 6, 6
TOKEN = "correct-horse-battery-staple"
SERVE = """
import sys
from proximetry.cli import main
sys.exit(main(["serve", *sys.argv[1:]]))
"""


def make_gallery(root, name="gallery"):
    images = make_images(root / "images", classes=CLASSES, each=EACH)
    catalog = Catalog.from_folder(images)
    years = [2000 + row % 10 for row in range(len(catalog))]
    known = [row % 2 == 0 for row in range(len(catalog))]
    catalog = replace(catalog, columns={"year": years, "reviewed": known})
    embedder = make_embedder()
    embedder.metrics = {"protocol": "held_out", "epoch": 3, "test": {"recall@1": 0.875}}
    return Gallery.build(embedder, catalog, root / name)


@pytest.fixture(autouse=True)
def isolated_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PROXIMETRY_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.delenv("PROXIMETRY_TOKEN", raising=False)


def random_points(vectors, similarity):
    return np.random.default_rng(0).random((len(vectors), 2), np.float32)


@pytest.fixture
def real_maps():
    """Compute maps in a process, which takes seconds to start."""


@pytest.fixture(autouse=True)
def quick_maps(request, monkeypatch):
    if "real_maps" not in request.fixturenames:
        monkeypatch.setattr(metrics, "map_embeddings", random_points)

        def start_here(self, gallery):
            gallery_map.compute(gallery.version, *gallery_map.sample(gallery), gallery.similarity)

        monkeypatch.setattr(gallery_map.MapMaker, "_start", start_here)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A gallery that no test changes."""
    return make_gallery(tmp_path_factory.mktemp("web"))


@pytest.fixture
def editable(tmp_path, monkeypatch):
    """A gallery that a test may change; the server checks for changes on every request."""
    monkeypatch.setattr(live_gallery, "_CHECK_INTERVAL", 0.0)
    return make_gallery(tmp_path)


def cache_map(gallery, cache):
    """Write a map of a gallery to the cache."""
    ids = gallery.ids()
    (cache / "maps").mkdir(parents=True, exist_ok=True)
    points = random_points(ids, gallery.similarity)
    np.savez(cache / "maps" / gallery_map._file(gallery.version).name, ids=ids, points=points)
    return cache


def client_of(path, token=None, **options):
    return TestClient(
        AccessMiddleware(make_app(path), token), base_url="http://localhost", **options
    )


@pytest.fixture
def client(shared):
    with client_of(shared.path) as test_client:
        yield test_client


@pytest.fixture
def editable_client(editable):
    with client_of(editable.path) as test_client:
        yield test_client


def png(color=(200, 30, 60), size=(24, 24)):
    """Return an image as PNG."""
    noise = np.random.default_rng(0).integers(0, 30, (*size[::-1], 3))
    buffer = io.BytesIO()
    Image.fromarray((noise + np.array(color)).clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def chunk(kind, data):
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def bomb(width=60_000, height=60_000):
    """A PNG of few bytes and 3.6 billion pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def start(server, log, *words, **environment):
    """Start a server in its own process; return both process and address once it is ready."""
    process = Process(server, log, SERVE, *words, "--port", 0, **environment)
    process.until(lambda: log.exists() and "Ctrl-C" in process.output())
    url = re.search(r"http://\S+", process.output())[0]
    health = re.sub(r"//[^/:]+:", "//127.0.0.1:", url.partition("?")[0]) + "healthz"
    process.until(lambda: httpx.get(health).status_code == 200)
    return process, url


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Containers may have no sandbox; the page is trusted.
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def live(server, shared, tmp_path_factory):
    """The address of a real server."""
    cache = cache_map(shared, tmp_path_factory.mktemp("cache"))
    log = tmp_path_factory.mktemp("log") / "log"
    process, url = start(server, log, shared.path, "--token", TOKEN, PROXIMETRY_CACHE=str(cache))
    yield url.replace("=TOKEN", f"={TOKEN}")
    process.send(signal.SIGINT)
    assert process.ended() == 0, process.output()


@pytest.fixture
def visit(browser, live):
    begun = []

    def begin(**options):
        begun.append(Visit(browser, live, **options))
        return begun[-1].page

    yield begin
    for one in begun:
        one.end()
