"""Compare galleries with plain faiss: build time, queries per second, recall@10.

python -m benchmarks.search [--size small] [--index Flat HNSW32 IVF1024,PQ64 BFlat]
python -m benchmarks.search --effort [--rows 60502] [--dim 512] [--index …]
python -m benchmarks.search --filters [--rows 20000] [--dim 64] [--per-class 100] [--index …]

The vectors lie around class centers in a low-dimensional subspace, like those of a trained
embedder. Plain faiss holds the same index in memory and is searched with the same settings. `faiss`
returns 10 results; `faiss, as many` returns as many candidates as a gallery re-scores.

`--effort` prints a table of recall@10 and queries per second of `ef` and `nprobe`, beside plain
faiss with the same settings: one query at a time, and 100.

`--filters` measures recall@10 with clusters as labels: without filters, and with filters that allow
a share of the classes, for queries of allowed classes (near) and of other classes (far). It is
measured with the default budget for exact scans and without any, as in galleries beyond it.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.measure import Run, alternate, versions
from proximetry.metrics import binary_codes
from proximetry.models import Embedder
from proximetry.search import Gallery, indexes, snapshot
from proximetry.search.exact import Part, Store
from proximetry.search.metadata import from_columns

SIZES = {"small": (60_502, 11_316), "large": (1_000_000, 100_000)}
DIM, K = 512, 10
# Dimension of the subspace; noise in it and in all dimensions, relative to a class center's length.
LATENT = 48
SPREAD, NOISE = 0.6, 0.15
KINDS = ("Flat", "HNSW32", "IVF1024,PQ64", "BFlat")
FILTERED = ("HNSW32", "IVF256,Flat", "IVF256,SQ8", "IVF256,PQ16x4", "SQ8", "BFlat")
SHARES = (0.05, 0.1, 0.2, 0.5, 0.8)
BATCHES = {"small": (1, 100, 1000), "large": (1, 100)}

Vectors = npt.NDArray[np.float32]


def data(count: int, classes: int, queries: int, dim: int = DIM) -> tuple[Vectors, Vectors]:
    draw = np.random.default_rng(0)
    centers = draw.standard_normal((classes, LATENT), dtype=np.float32)
    basis = np.linalg.qr(draw.standard_normal((dim, LATENT)))[0].T.astype(np.float32)

    def some(number: int) -> Vectors:
        found = np.empty((number, dim), np.float32)
        for start in range(0, number, 65_536):  # in parts: all noise would take 2 GB
            part = found[start : start + 65_536]
            inner = centers[draw.integers(classes, size=len(part))]
            inner = inner + SPREAD * draw.standard_normal(inner.shape, dtype=np.float32)
            part[:] = draw.standard_normal(part.shape, dtype=np.float32)
            part *= NOISE * np.sqrt(LATENT / dim)
            part += inner @ basis
            part /= np.linalg.norm(part, axis=1, keepdims=True)
        return found

    return some(count), some(queries)


def build_plain(kind: str, vectors: Vectors) -> Any:
    made = indexes._make(kind, DIM, "cosine")
    if kind == "BFlat":
        made.add(binary_codes(vectors))
        return made
    if not made.is_trained:
        made.train(vectors[: indexes._POINTS_PER_LIST * 1024])
    made.add(vectors)
    return set_depth(made)


def plain_index(kind: str, size: str, vectors: Vectors, folder: Path) -> tuple[Any, str]:
    """Return an index of faiss in memory, and its build time; a large one is the gallery's."""
    if size == "small" or kind in ("Flat", "BFlat"):
        start = time.perf_counter()
        made = build_plain(kind, vectors)
        return made, f"{time.perf_counter() - start:.1f} s"
    (file,) = folder.glob("segments/*/index.faiss")
    return set_depth(indexes.load_faiss().read_index(str(file))), "not built"


def set_depth(index: Any) -> Any:
    if hasattr(index, "nprobe"):
        index.nprobe = indexes.choose_nprobe(index.nlist)
    if hasattr(index, "hnsw"):
        index.hnsw.efSearch = indexes.EF_SEARCH
    return index


def recall(ids: npt.NDArray[Any], truth: npt.NDArray[Any]) -> float:
    hits = [np.isin(a, b).mean() for a, b in zip(ids, truth, strict=True)]
    return float(np.mean(hits))


def exact(vectors: Vectors, queries: Vectors) -> npt.NDArray[np.int64]:
    store = Store([vectors], np.array([0, len(vectors)]), "cosine", 1.001)
    return store.search([Part(vectors, None, 0)], queries, K).positions


def compare(
    kind: str, size: str, vectors: Vectors, queries: Vectors, truth: Any, home: Path
) -> Any:
    count = len(vectors)
    embedder = Embedder.create("small_convnet", DIM, weights="none", image_size=24)
    rows = from_columns({"path": [f"/images/{i:07d}.jpg" for i in range(count)]})
    folder = home / f"{size}-{kind.replace(',', '-')}"
    start = time.perf_counter()
    Gallery.build(embedder, rows, folder, kind, vectors=vectors)
    built = time.perf_counter() - start
    start = time.perf_counter()
    gallery = Gallery.open(folder)
    opened = time.perf_counter() - start
    plain, built_plain = plain_index(kind, size, vectors, folder)
    searched = binary_codes(queries) if kind == "BFlat" else queries
    found = gallery.search(queries, K)
    if truth is None:
        truth = found.ids if kind == "Flat" else exact(vectors, queries)
    plain_found = plain.search(searched, K)[1]
    print(f"\n{kind}, {count} vectors")
    print(f"  build {built:.1f} s, plain faiss {built_plain}; open {opened:.3f} s")
    print(f"  recall@10 {recall(found.ids, truth):.4f}, plain {recall(plain_found, truth):.4f}")
    index = gallery._snapshot.segments[0].index  # type: ignore[union-attr]
    more = K if index is None else index.count(K)
    for batch in BATCHES[size]:
        # The time of a scan does not depend on the query; that of an index does.
        total = batch if batch > 1 else 4 if kind in ("Flat", "BFlat") else 100

        def measure_search(search: Any, some: Any, size: int = batch, total: int = total) -> Run:
            return lambda: [search(some[i : i + size]) for i in range(0, total, size)]

        runs: dict[str, Run] = {
            "gallery": measure_search(lambda some: gallery.search(some, K), queries),
            "faiss": measure_search(lambda some: plain.search(some, K), searched),
        }
        if more > K:
            runs["faiss, as many"] = measure_search(lambda some: plain.search(some, more), searched)
        seconds = alternate(runs, 5)
        shown = ", ".join(
            f"{name} {total / each:.0f}/s ({seconds['gallery'] / each:.2f} ×)"
            for name, each in seconds.items()
        )
        print(f"  {batch} at a time: {shown}", flush=True)
    times = []
    for turn in range(3):
        more_rows = from_columns({"path": [f"/more/{turn}-{i}.jpg" for i in range(1000)]})
        start = time.perf_counter()
        gallery.add(more_rows, vectors=vectors[:1000])
        times.append(time.perf_counter() - start)
    print(
        f"  adding 1 000: {statistics.median(times):.2f} s (largest {max(times):.2f})", flush=True
    )
    shutil.rmtree(folder)
    return truth


def efforts(kind: str) -> list[dict[str, int]]:
    """Return the settings of a table, after those chosen at build time."""
    if "HNSW" in kind:
        return [{}, {"ef": 16}, {"ef": 64}, {"ef": 256}]
    return [{}, {"nprobe": 8}, {"nprobe": 32}, {"nprobe": 128}] if "IVF" in kind else []


def measure_effort(kind: str, vectors: Vectors, queries: Vectors, truth: Any, home: Path) -> Any:
    """Print the rows of a Markdown table for one index; return the exact results."""
    count, dim = vectors.shape
    embedder = Embedder.create("vectors", None, weights="none", input_dim=dim)
    rows = from_columns({"path": [f"/images/{i:08d}.jpg" for i in range(count)]})
    start = time.perf_counter()
    gallery = Gallery.build(embedder, rows, home / "gallery", kind, vectors=vectors)
    built = time.perf_counter() - start
    (info,) = gallery._snapshot.manifest.segments
    print(f"\n{kind} → {info.index or 'Flat'}, {count} × {dim}: build {built:.0f} s", flush=True)
    if truth is None:
        truth = gallery.search(queries, K, exact=True).ids
    plain: Any = None
    if info.index:
        (file,) = (home / "gallery").glob("segments/*/index.faiss")
        plain = set_depth(indexes.load_faiss().read_index(str(file)))
    print("| setting | recall@10 | plain | 1 at a time | plain | 100 at a time | plain |")
    print("|---|---|---|---|---|---|---|")
    settings: list[dict[str, Any]] = [*efforts(info.index), {"exact": True}]
    for options in settings:
        exact = "exact" in options
        hnsw, ivf = "HNSW" in info.index, "IVF" in info.index
        if plain is not None and not exact:
            if hnsw:
                plain.hnsw.efSearch = options.get("ef", indexes.EF_SEARCH * info.effort)
            if ivf:
                default = indexes.choose_nprobe(plain.nlist) * info.effort
                plain.nprobe = options.get("nprobe", min(default, plain.nlist))
        names = [f"{name} = {value}" for name, value in options.items()]
        cells = ["exact" if exact else ", ".join(names) or f"default, effort {info.effort}"]
        found = gallery.search(queries, K, **options)
        cells.append(f"{recall(found.ids, truth):.3f}")
        with_plain = plain is not None and not exact
        cells.append(f"{recall(plain.search(queries, K)[1], truth):.3f}" if with_plain else "")
        for batch, total in ((1, 5 if exact else 200), (100, 100 if exact else 200)):

            def timed(search: Any, batch: int = batch, total: int = total) -> Run:
                return lambda: [search(queries[i : i + batch]) for i in range(0, total, batch)]

            runs = {"gallery": timed(lambda some: gallery.search(some, K, **options))}  # noqa: B023
            if with_plain:
                runs["faiss"] = timed(lambda some: plain.search(some, K))
            seconds = alternate(runs, 3)
            cells += [
                f"{total / seconds[name]:.0f}" if name in seconds else ""
                for name in ("gallery", "faiss")
            ]
        print(f"| {' | '.join(cells)} |", flush=True)
    shutil.rmtree(home / "gallery")
    return truth


def measure_filters(kind: str, count: int, dim: int, per_class: int, home: Path) -> None:
    """Print recall@10 of one index, one line for each share of allowed classes."""
    draw = np.random.default_rng(0)
    classes = count // per_class
    centers = draw.standard_normal((classes, dim), dtype=np.float32)

    def some(labels: npt.NDArray[np.int64]) -> Vectors:
        noise = draw.standard_normal((len(labels), dim), dtype=np.float32)
        found = centers[labels] + SPREAD * noise
        return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))

    labels = draw.integers(classes, size=count)
    embedder = Embedder.create("small_convnet", dim, weights="none", image_size=24)
    names = [f"/images/{i:07d}.jpg" for i in range(count)]
    rows = from_columns({"path": names, "label": list(map(str, labels))})
    start = time.process_time()
    gallery = Gallery.build(
        embedder, rows, home / kind.replace(",", "-"), kind, vectors=some(labels)
    )
    built = time.process_time() - start
    (info,) = gallery._snapshot.manifest.segments
    stored = gallery.vectors(gallery.ids())
    store = Store([stored], np.array([0, count]), "cosine", 1.001)
    print(
        f"\n{kind}: {count} × {dim}, {classes} classes; CPU time to build {built:.0f} s, "
        f"recall@10 at build time {info.recall:.3f} with effort {info.effort}"
    )
    for share in (*SHARES, 1.0):
        inside = np.arange(classes) < share * classes
        where = {"label": list(map(str, np.flatnonzero(inside)))} if share < 1 else None
        part = Part(stored, None, 0, allowed=inside[labels])
        line = f"  {share:4.2f} of the classes:"
        for name, chosen in (("near", inside), ("far", ~inside)):
            if not chosen.any():
                continue
            queries = some(draw.choice(np.flatnonzero(chosen), 200))
            truth = store.search([part], queries, K).positions
            for budget, about in ((snapshot.MAX_SCAN_ENTRIES, ""), (0, " without a budget")):
                before, snapshot.MAX_SCAN_ENTRIES = snapshot.MAX_SCAN_ENTRIES, budget
                start = time.process_time()
                found = gallery.search(queries, K, where=where)
                spent = (time.process_time() - start) / len(queries)
                snapshot.MAX_SCAN_ENTRIES = before
                line += f" {name}{about} {recall(truth, found.ids):.3f} ({spent * 1e3:.2f} ms);"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=tuple(SIZES), help="one size only; default: both")
    parser.add_argument("--index", nargs="+", help="faiss factory strings")
    parser.add_argument("--filters", action="store_true", help="recall@10 of filtered searches")
    parser.add_argument("--effort", action="store_true", help="recall and time of ef and nprobe")
    parser.add_argument("--rows", type=int, default=20_000, help="vectors for --effort, --filters")
    parser.add_argument("--dim", type=int, default=64, help="dimensions for --effort, --filters")
    parser.add_argument("--per-class", type=int, default=100, help="class size for --filters")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    faiss = indexes.load_faiss()
    faiss.omp_set_num_threads(arguments.threads)
    print(f"{versions()}, faiss {faiss.__version__}")
    if arguments.effort:
        classes = max(1, arguments.rows // 10)
        vectors, queries = data(arguments.rows, classes, 500, arguments.dim)
        truth: Any = None
        with tempfile.TemporaryDirectory(prefix="proximetry-benchmark-") as home:
            for kind in arguments.index or ("auto",):
                truth = measure_effort(kind, vectors, queries, truth, Path(home))
        return
    if arguments.filters:
        with tempfile.TemporaryDirectory(prefix="proximetry-benchmark-") as home:
            for kind in arguments.index or FILTERED:
                shape = arguments.rows, arguments.dim, arguments.per_class
                measure_filters(kind, *shape, Path(home))
        return
    for size in [arguments.size] if arguments.size else list(SIZES):
        vectors, queries = data(*SIZES[size], max(BATCHES[size]))
        truth = None
        with tempfile.TemporaryDirectory(prefix="proximetry-benchmark-") as home:
            for kind in arguments.index or KINDS:
                truth = compare(kind, size, vectors, queries, truth, Path(home))


if __name__ == "__main__":
    main()
