"""`Service`: what the HTTP API does, without HTTP."""

import asyncio
import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from fastapi import HTTPException

from proximetry._util.machine import cores
from proximetry.data import ImageError, open_image
from proximetry.models import Embedder
from proximetry.models.explain import is_explainable
from proximetry.search import Gallery
from proximetry.web.gallery_map import MapMaker
from proximetry.web.live_gallery import LiveGallery, to_json_value
from proximetry.web.middleware import MAX_BYTES
from proximetry.web.responses import MAX_CLASSES, ClassCount, ColumnInfo, GalleryInfo, Map
from proximetry.web.searcher import MAX_PIXELS, QueryImage, Searcher, read_query

T = TypeVar("T")


class Service:
    """The gallery, searches and map of the application."""

    def __init__(self, source: Path | Gallery, full_paths: bool = False) -> None:
        self.gallery = LiveGallery(source, full_paths, _warm_up)
        self._pool = ThreadPoolExecutor(cores(), thread_name_prefix="images")
        self.searcher = Searcher(self.gallery, self._pool)
        self.maps = MapMaker()
        self._map: tuple[tuple[str, str], bytes] | None = None
        self._explainer = ThreadPoolExecutor(1, thread_name_prefix="explain")
        self.started = time.monotonic()
        self.loading = self._pool.submit(self._load)

    def _load(self) -> None:
        """Load what the first requests need."""
        _warm_up(self.gallery.current())
        self.maps.get(self.gallery.summary().gallery)

    def close(self) -> None:
        """Stop all threads and processes."""
        self.maps.close()
        self.searcher.close()
        self._explainer.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a function that reads files in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    async def explain(self, query: QueryImage, result: int) -> bytes:
        """Return an image of why a query is similar to another image, as WebP."""

        def draw() -> bytes:
            gallery = self.gallery.current()
            other = self.gallery.path_of(gallery, result)
            source = read_query(self.gallery, gallery, query)
            if isinstance(source, bytes):  # check the upload before it is decoded at full size
                open_image(source, max_pixels=MAX_PIXELS, size=16)
            try:
                picture = gallery.embedder.explain(source, other).image()
            except ImageError as error:
                raise HTTPException(410, f"an image cannot be shown: {error.reason}") from None
            buffer = io.BytesIO()
            picture.save(buffer, "WEBP", quality=85)
            return buffer.getvalue()

        # One at a time: the threads of the pool also decode the uploads of searches.
        return await asyncio.get_running_loop().run_in_executor(self._explainer, draw)

    def describe(self) -> GalleryInfo:
        """Return the description of the gallery."""
        summary = self.gallery.summary()
        gallery, embedder = summary.gallery, summary.gallery.embedder
        classes = [ClassCount(name=name, images=count) for name, count in summary.classes.items()]
        return GalleryInfo(
            name=self.gallery.name,
            version=gallery.version,
            images=self.gallery.count(),
            dim=gallery.dim,
            similarity=gallery.similarity,
            index=gallery.index,
            columns=[ColumnInfo(**column._asdict()) for column in summary.columns],
            classes=classes[:MAX_CLASSES],
            class_count=len(classes),
            suggested=summary.suggested,
            backbone=embedder.architecture.backbone,
            image_size=list(embedder.preprocessing.crop) if embedder.takes_images else [],
            has_images=summary.has_images,
            searches_images=embedder.takes_images,
            calibrated=gallery.calibration is not None,
            metrics=to_json_value(embedder.metrics),
            explains=_is_explainable(embedder),
            limits={"bytes": MAX_BYTES, "pixels": MAX_PIXELS},
        )

    def map(self) -> tuple[int, bytes]:
        """Return the HTTP status and the map as JSON, serialized once per version."""
        summary = self.gallery.summary()
        gallery = summary.gallery
        current = self.maps.get(gallery)
        if current is None:
            seconds = round(time.monotonic() - self.maps.started, 1)
            state = Map(state="computing", seconds=seconds, images=len(gallery))
            return 202, state.model_dump_json().encode()
        key = current.version, gallery.version
        if self._map is None or self._map[0] != key:
            exists = gallery.exists(current.ids)  # the map may be of an earlier version
            ids, points = current.ids[exists], current.points[exists].astype(float).round(4)
            number = {name: row for row, name in enumerate(summary.classes)}
            labels = gallery.rows(ids, ["label"])["label"]
            response = Map(
                state="ready",
                images=len(gallery),
                outdated=current.version != gallery.version,
                ids=ids.tolist(),
                x=points[:, 0].tolist(),
                y=points[:, 1].tolist(),
                label=[number.get(to_json_value(label), -1) for label in labels],
                labels=list(number),
            )
            self._map = key, response.model_dump_json().encode()
        return 200, self._map[1]


def _warm_up(gallery: Gallery) -> None:
    """Load the embedder and use it once, so that the first query is fast."""
    embedder = gallery.embedder
    if embedder.takes_images:
        height, width = embedder.preprocessing.crop
        blank = torch.zeros(1, 3, height, width, dtype=torch.uint8, device=embedder.device)
        embedder.embed(blank)
    _is_explainable(embedder)


@lru_cache(maxsize=2)
def _is_explainable(embedder: Embedder) -> bool:
    return embedder.takes_images and is_explainable(embedder)
