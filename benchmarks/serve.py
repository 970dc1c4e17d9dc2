"""Load-test the search page: latency with concurrent clients, with and without the model.

python -m benchmarks.serve [--clients 50] [--seconds 30] [--index Flat]

The server runs in a separate process, with 60 502 vectors of 512 dimensions, tiny image files and
an exact index. Each client keeps its connection open and sends the next query immediately after a
response, or a second later. All clients run in this process, on the same cores as the server.

The server reports the model's time for the batch of a query in `Server-Timing`. "beyond the model"
is the latency without that time.
"""

import argparse
import asyncio
import io
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
from PIL import Image

from benchmarks.measure import versions
from benchmarks.search import DIM, SIZES, data
from proximetry._util.machine import cores
from proximetry.models import Embedder
from proximetry.search import Gallery
from proximetry.search.metadata import from_columns
from proximetry.web.gallery_map import MAX_POINTS

SIDE, K = 32, 10
DIFFERENT = 200  # queries


class RequestTimes(NamedTuple):
    """The seconds of one request: the latency, and the parts that the server reports."""

    seconds: float
    model: float
    wait: float
    search: float


def make_image(draw: np.random.Generator) -> bytes:
    buffer = io.BytesIO()
    pixels = draw.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def build(home: Path, index: str) -> Gallery:
    """Build a gallery of image files with a precomputed map."""
    count, classes = SIZES["small"]
    draw = np.random.default_rng(0)
    paths = [home / "images" / f"{row // 1000:03d}" / f"{row:06d}.png" for row in range(count)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_image(draw))
    vectors, _ = data(count, classes, 1)
    labels = [f"class {row % classes}" for row in range(count)]
    rows = from_columns({"path": [str(path) for path in paths], "label": labels})
    embedder = Embedder.create("small_convnet", DIM, weights="none", image_size=SIDE)
    gallery = Gallery.build(embedder, rows, home / "gallery", index, vectors=vectors)
    maps = home / "cache" / "maps"
    maps.mkdir(parents=True)
    ids = gallery.ids()[:MAX_POINTS]
    points = draw.random((len(ids), 2), np.float32)
    np.savez(maps / f"{gallery.version[:32]}.npz", ids=ids, points=points)
    return gallery


def request(fields: dict[str, str], image: bytes | None) -> bytes:
    parts = [
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    if image is not None:
        start = b'--b\r\nContent-Disposition: form-data; name="image"; filename="x.png"\r\n'
        parts.append(start + b"Content-Type: image/png\r\n\r\n" + image + b"\r\n")
    body = b"".join(parts) + b"--b--\r\n"
    head = (
        "POST /search HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def queries(kind: str, total: int) -> list[bytes]:
    draw = np.random.default_rng(1)
    if kind == "images":
        return [request({"k": str(K)}, make_image(draw)) for _ in range(DIFFERENT)]
    ids = draw.integers(total, size=DIFFERENT)
    return [request({"k": str(K), "id": str(one)}, None) for one in ids]


def wait_until_loaded(port: int) -> None:
    """Wait while the server answers 503."""
    for _ in range(600):
        with suppress(HTTPError):
            urlopen(f"http://127.0.0.1:{port}/healthz").close()
            return
        time.sleep(0.1)
    raise TimeoutError("the server does not load the gallery")


async def client(
    port: int,
    requests: list[bytes],
    first: int,
    pause: float,
    until: float,
    done: list[RequestTimes | str],
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    number = first
    await asyncio.sleep(pause * (0.618 * first % 1))  # so that requests do not coincide
    while time.perf_counter() < until:
        begun = time.perf_counter()
        writer.write(requests[number % len(requests)])
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        await reader.readexactly(int(length[1]))
        seconds = time.perf_counter() - begun
        if head.startswith(b"HTTP/1.1 200"):
            spent = [float(one) / 1000 for one in re.findall(rb"dur=([\d.]+)", head)]
            wait, model, search = spent
            done.append(RequestTimes(seconds, model, wait, search))
        else:
            done.append(head.split(b"\r\n")[0].decode())
        number += 1
        await asyncio.sleep(pause)
    writer.close()


async def load(
    port: int, requests: list[bytes], clients: int, pause: float, seconds: float
) -> list[RequestTimes]:
    done: list[RequestTimes | str] = []
    until = time.perf_counter() + seconds
    await asyncio.gather(
        *(client(port, requests, 7 * number, pause, until, done) for number in range(clients))
    )
    errors = [one for one in done if isinstance(one, str)]
    print(f"  {len(done)} requests in {seconds:g} s: {len(done) / seconds:.0f} per second, "
          f"{len(errors)} errors {set(errors) or ''}")  # fmt: skip
    return [one for one in done if not isinstance(one, str)]


def report(answered: list[RequestTimes]) -> None:
    def quantiles(values: list[float]) -> str:
        cuts = statistics.quantiles(values, n=100)
        return " / ".join(f"{1000 * cuts[place - 1]:.1f}" for place in (50, 95, 99))

    print("  milliseconds, median / 95 % / 99 %:")
    print(f"    latency           {quantiles([one.seconds for one in answered])}")
    print(f"    model             {quantiles([one.model for one in answered])}")
    print(f"    beyond the model  {quantiles([one.seconds - one.model for one in answered])}")
    print(f"      waiting         {quantiles([one.wait for one in answered])}")
    print(f"      searching       {quantiles([one.search for one in answered])}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--index", default="Flat")
    options = parser.parse_args()
    print(f"{versions()}, {cores()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="proximetry-serve-") as folder:
        home = Path(folder)
        gallery = build(home, options.index)
        print(gallery)
        process = subprocess.Popen(
            [sys.executable, "-m", "proximetry", "serve", str(gallery.path), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PROXIMETRY_CACHE": str(home / "cache")},
        )
        try:
            assert process.stdout is not None
            while (match := re.search(r":(\d+)/", process.stdout.readline())) is None:
                assert process.poll() is None
            port = int(match[1])
            wait_until_loaded(port)
            for kind in ("images", "ids"):
                requests = queries(kind, len(gallery))
                for clients, pause in ((1, 0), (options.clients, 1), (options.clients, 0)):
                    print(f"\n{kind}, clients: {clients}, which pause for {pause} s")
                    asyncio.run(load(port, requests, clients, 0, 2))  # to warm up
                    seconds = options.seconds if clients > 1 else min(5, options.seconds)
                    report(asyncio.run(load(port, requests, clients, pause, seconds)))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


if __name__ == "__main__":
    main()
