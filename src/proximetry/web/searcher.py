"""`Searcher`: batched searches of many clients.

A search reads every vector once, whatever the number of queries, so fifty queries take hardly
longer than one. A batch contains all queries that arrived while the previous one was computed.
"""

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch
from fastapi import HTTPException
from torch import Tensor

from proximetry._util.errors import UsageError
from proximetry._util.types import FloatArray
from proximetry.data import open_image
from proximetry.models import Embedder
from proximetry.search import Gallery, SearchResult
from proximetry.search.conditions import Where
from proximetry.search.milvus_client import MilvusError
from proximetry.search.queries import Combine, crop
from proximetry.web.live_gallery import LiveGallery

log = logging.getLogger("proximetry.web")

MAX_PIXELS = 50_000_000  # of an upload: 150 MB when decoded
_BATCH = 64  # queries

Box = tuple[float, float, float, float]
"""Left, top, right and bottom of a part of an image, as fractions of its width and height."""


class QueryImage(NamedTuple):
    """An image to search for: an upload, or an image of the gallery."""

    read: Callable[[], bytes] | None = None
    item: int | None = None  # an id
    box: Box | None = None  # the part to search for


class Answer(NamedTuple):
    """Results, nearest first, the query images of the gallery, and durations in seconds.

    ``match_threshold`` is the similarity that a match needs, if the embedder is calibrated.
    """

    results: list[dict[str, Any]]
    queries: list[dict[str, Any] | None]
    similarity: str
    match_threshold: float | None
    images: int
    wait: float
    model: float
    search: float


class _Job(NamedTuple):
    """The search of one client: pixels for the network, or ids of images in the gallery."""

    future: Future[Answer]
    start: float
    embedder: Embedder | None  # the embedder that the pixels are prepared for
    pixels: list[Tensor | None]  # of each query image, uint8 [3, H, W]
    items: list[int | None]
    combine: Combine
    k: int  # number of results
    where: Where


def read_query(gallery: LiveGallery, version: Gallery, query: QueryImage) -> Any:
    """Return a query image, or the part in its box, for the embedder.

    Raises:
        ImageError: if it is not an image, or larger than MAX_PIXELS.
    """
    source: Any = query.read() if query.read else gallery.path_of(version, query.item)
    if query.box is None:
        return source
    image = open_image(source, max_pixels=MAX_PIXELS)
    left, top, right, bottom = query.box
    width, height = image.size
    x, y = min(int(left * width), width - 1), min(int(top * height), height - 1)
    return crop(image, (x, y, max(x + 1, round(right * width)), max(y + 1, round(bottom * height))))


class Searcher:
    """Answers queries in one thread, and decodes images in a pool."""

    def __init__(self, gallery: LiveGallery, pool: Executor) -> None:
        self._gallery, self._pool = gallery, pool
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="search", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread after answering the waiting queries."""
        self._jobs.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether queries are answered."""
        return self._thread.is_alive()

    async def search(
        self, queries: Sequence[QueryImage], k: int, where: Where, combine: Combine = "mean"
    ) -> Answer:
        """Search for the images nearest to all query images (mean), or to any of them (max).

        Images of the gallery are excluded from their own results. Raises ImageError or
        HTTPException.
        """

        stored = [query.read is None and query.box is None for query in queries]

        def decode() -> tuple[Embedder, list[Tensor | None]]:
            gallery = self._gallery.current()
            preprocessing = gallery.embedder.preprocessing
            if not gallery.embedder.takes_images:
                raise HTTPException(422, f"the embedder takes {preprocessing}, not images")
            pixels = list[Tensor | None]()
            for query, is_stored in zip(queries, stored, strict=True):
                if is_stored:
                    pixels.append(None)
                else:  # the limit is checked before anything is decoded
                    source = read_query(self._gallery, gallery, query)
                    pixels.append(preprocessing.pixels(source, max_pixels=MAX_PIXELS))
            return gallery.embedder, pixels

        embedder: Embedder | None = None
        pixels: list[Tensor | None] = [None] * len(queries)
        if not all(stored):
            loop = asyncio.get_running_loop()
            embedder, pixels = await loop.run_in_executor(self._pool, decode)
        items = [query.item for query in queries]
        job = _Job(Future(), time.perf_counter(), embedder, pixels, items, combine, k, where)
        self._jobs.put(job)
        return await asyncio.wrap_future(job.future)

    def _work(self) -> None:
        ending = False
        while not ending:
            waiting = [self._jobs.get()]
            while len(waiting) < _BATCH and not self._jobs.empty():
                waiting.append(self._jobs.get())
            ending = None in waiting
            # Skip queries of clients that have disconnected.
            jobs = [job for job in waiting if job and job.future.set_running_or_notify_cancel()]
            self._answer(jobs)

    def _answer(self, jobs: list[_Job]) -> None:
        """Answer jobs together or, after an unexpected error, separately."""
        try:
            self._answer_batch(jobs)
        except Exception as error:  # a bug; other queries are answered
            waiting = [job for job in jobs if not job.future.done()]
            if isinstance(error, MilvusError):  # it would not answer the others either
                for job in waiting:
                    job.future.set_exception(error)
            elif len(jobs) == 1:
                log.exception("a search failed")
                jobs[0].future.set_exception(error)
            else:
                for job in waiting:
                    self._answer([job])

    def _answer_batch(self, jobs: list[_Job]) -> None:
        started = time.perf_counter()
        gallery = self._gallery.current()
        records: dict[int, list[dict[str, Any] | None]] = {}
        images: list[Tensor] = []
        for number, job in enumerate(jobs):
            try:
                if job.embedder not in (None, gallery.embedder):
                    message = "the gallery was rebuilt; try again"
                    raise HTTPException(503, message, {"Retry-After": "1"})
                records[number] = [
                    None if item is None else self._gallery.item(gallery, item)
                    for item in job.items
                ]
                images += [pixels for pixels in job.pixels if pixels is not None]
            except HTTPException as error:
                job.future.set_exception(error)
        embedded = iter(())
        if images:
            pixels = torch.stack(images).to(gallery.embedder.device)
            embedded = iter(gallery.embedder.embed(pixels).cpu().numpy())
        vectors: dict[int, FloatArray] = {}
        for number in records:
            job = jobs[number]
            parts = [
                gallery.vectors(np.array([item]))[0] if pixels is None else next(embedded)
                for pixels, item in zip(job.pixels, job.items, strict=True)
            ]
            vectors[number] = np.stack(parts)
        search_started = time.perf_counter()
        groups: dict[tuple[int, str, int | None], list[int]] = defaultdict(list)
        for number in vectors:
            job = jobs[number]
            # Images of the gallery are their own nearest neighbors.
            excluded = sum(item is not None for item in job.items)
            separate = number if len(vectors[number]) > 1 else None
            where = json.dumps(job.where, sort_keys=True)
            groups[job.k + excluded, where, separate].append(number)
        count = self._gallery.count()
        for (k, where, separate), members in groups.items():
            try:
                result = gallery.search(
                    np.concatenate([vectors[number] for number in members]),
                    k,
                    where=json.loads(where),
                    combine=None if separate is None else jobs[separate].combine,
                )
            except UsageError as error:
                for number in members:
                    jobs[number].future.set_exception(error)
                continue
            lists = self._lists(result, [jobs[number] for number in members])
            done = time.perf_counter()
            for number, matches in zip(members, lists, strict=True):
                answer = Answer(
                    matches,
                    records[number],
                    gallery.similarity,
                    result.threshold,
                    count,
                    started - jobs[number].start,
                    search_started - started,
                    done - search_started,
                )
                jobs[number].future.set_result(answer)

    def _lists(self, result: SearchResult, jobs: list[_Job]) -> Iterator[list[dict[str, Any]]]:
        """Yield the results of each job, without the query images."""
        # Lists, because iterating over arrays takes longer than the search.
        columns = {name: result.column(name).tolist() for name in result.columns}
        ids, similarities = result.ids.tolist(), result.similarities.tolist()
        for row, job in enumerate(jobs):
            others = [
                rank for rank, item in enumerate(ids[row]) if item >= 0 and item not in job.items
            ]
            ranks = others[: job.k]
            metadata = {
                name: [values[row][rank] for rank in ranks] for name, values in columns.items()
            }
            matches = self._gallery.records([ids[row][rank] for rank in ranks], metadata)
            for number, (rank, match) in enumerate(zip(ranks, matches, strict=True), 1):
                match |= {"rank": number, "similarity": round(similarities[row][rank], 6)}
                if result.probabilities is not None:
                    match["probability"] = round(float(result.probabilities[row, rank]), 4)
                    match["match"] = bool(result.is_match[row, rank])
            yield matches
