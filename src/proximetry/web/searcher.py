"""`Searcher`: batched searches of many clients.

A search reads every vector once, whatever the number of queries, so fifty queries take hardly
longer than one. A batch contains all queries that arrived while the previous one was computed.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch
from fastapi import HTTPException
from torch import Tensor

from proximetry._util.errors import UsageError
from proximetry.models import Embedder
from proximetry.search import SearchResult
from proximetry.web.live_gallery import LiveGallery

log = logging.getLogger("proximetry.web")

MAX_PIXELS = 50_000_000  # of an upload: 150 MB when decoded
_BATCH = 64  # queries

Conditions = tuple[tuple[str, tuple[str, ...]], ...]


class Answer(NamedTuple):
    """Results, nearest first, the query if it is in the gallery, and durations in seconds.

    ``match_threshold`` is the similarity that a match needs, if the embedder is calibrated.
    """

    results: list[dict[str, Any]]
    query: dict[str, Any] | None
    similarity: str
    match_threshold: float | None
    images: int
    wait: float
    model: float
    search: float


class _Job(NamedTuple):
    """The query of one client: pixels for the network, or an image of the gallery."""

    future: Future[Answer]
    start: float
    embedder: Embedder | None  # the embedder that the pixels are prepared for
    pixels: Tensor | None  # uint8 [3, H, W]
    item: Any  # an id
    k: int  # number of results
    where: Conditions


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

    def warm_up(self) -> None:
        """Load the embedder and embed once, so that the first query is fast."""
        embedder = self._gallery.current().embedder
        height, width = embedder.preprocessing.crop
        embedder.embed(torch.zeros(1, 3, height, width, dtype=torch.uint8, device=embedder.device))

    async def search_image(self, read: Callable[[], bytes], k: int, where: Conditions) -> Answer:
        """Search for the images nearest to an upload; raise ImageError or HTTPException."""

        def decode() -> tuple[Embedder, Tensor]:
            embedder = self._gallery.current().embedder
            # The limit is checked before anything is decoded.
            return embedder, embedder.preprocessing.pixels(read(), max_pixels=MAX_PIXELS)

        loop = asyncio.get_running_loop()
        embedder, pixels = await loop.run_in_executor(self._pool, decode)
        return await self._submit(embedder, pixels, None, k, where)

    async def search_item(self, item: int, k: int, where: Conditions) -> Answer:
        """Search for the images nearest to an image of the gallery, which is excluded."""
        return await self._submit(None, None, item, k, where)

    async def _submit(self, *query: Any) -> Answer:
        job = _Job(Future(), time.perf_counter(), *query)
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
            try:
                self._answer(jobs)
            except Exception as error:  # a bug; later queries are answered
                log.exception("a search failed")
                for job in jobs:
                    if not job.future.done():
                        job.future.set_exception(error)

    def _answer(self, jobs: list[_Job]) -> None:
        started = time.perf_counter()
        gallery = self._gallery.current()
        vectors: dict[int, Tensor] = {}
        items: dict[int, dict[str, Any]] = {}
        images: dict[int, Tensor] = {}
        for number, job in enumerate(jobs):
            if job.pixels is None:
                try:
                    items[number] = self._gallery.item(gallery, job.item)
                    vectors[number] = torch.from_numpy(gallery.vectors([job.item])[0])
                except HTTPException as error:
                    job.future.set_exception(error)
            elif job.embedder is gallery.embedder:
                images[number] = job.pixels
            else:
                message = "the gallery was rebuilt; try again"
                job.future.set_exception(HTTPException(503, message, {"Retry-After": "1"}))
        if images:
            pixels = torch.stack([*images.values()])
            embedded = gallery.embedder.embed(pixels.to(gallery.embedder.device)).cpu()
            vectors |= dict(zip(images, embedded, strict=True))
        search_started = time.perf_counter()
        groups: dict[tuple[int, Conditions], list[int]] = defaultdict(list)
        for number in vectors:
            job = jobs[number]
            # One more, since an image of the gallery is its own nearest neighbor.
            groups[job.k + (job.item is not None), job.where].append(number)
        for (k, where), members in groups.items():
            try:
                result = gallery.search(
                    torch.stack([vectors[number] for number in members]), k, where=dict(where)
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
                    items.get(number),
                    gallery.similarity,
                    result.threshold,
                    len(gallery),
                    started - jobs[number].start,
                    search_started - started,
                    done - search_started,
                )
                jobs[number].future.set_result(answer)

    def _lists(self, result: SearchResult, jobs: list[_Job]) -> Iterator[list[dict[str, Any]]]:
        """Yield the results of each query, without the query itself."""
        # Lists, because iterating over arrays takes longer than the search.
        columns = {name: result.column(name).tolist() for name in result.columns}
        rows = zip(jobs, result.ids.tolist(), result.similarities.tolist(), strict=True)
        for row, (job, ids, similarities) in enumerate(rows):
            ranks = [n for n, item in enumerate(ids) if item >= 0 and item != job.item][: job.k]
            ranked = {name: [values[row][n] for n in ranks] for name, values in columns.items()}
            matches = self._gallery.records([ids[n] for n in ranks], ranked)
            for position, (rank, match) in enumerate(zip(ranks, matches, strict=True)):
                match |= {"rank": position + 1, "similarity": round(similarities[rank], 6)}
                if result.probabilities is not None:
                    match["probability"] = round(float(result.probabilities[row, rank]), 4)
                    match["match"] = bool(result.is_match[row, rank])
            yield matches
