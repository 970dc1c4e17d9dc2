"""The HTTP API and the page, as one application."""

import asyncio
import io
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import lru_cache
from itertools import chain, repeat
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field, PlainSerializer, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from proximetry import __version__
from proximetry._util.errors import UsageError, suggest
from proximetry._util.formatting import format_value, pluralize, shorten
from proximetry._util.machine import cores
from proximetry.data import ImageError, open_image
from proximetry.models import Embedder
from proximetry.models.explain import is_explainable
from proximetry.search import Gallery
from proximetry.search.conditions import Where, parse_conditions
from proximetry.search.duplicates import ROUNDING
from proximetry.search.milvus_client import MilvusError
from proximetry.search.prediction import vote
from proximetry.web.gallery_map import MAX_POINTS, MapError, MapMaker
from proximetry.web.live_gallery import SIZES, LiveGallery, to_json_value
from proximetry.web.middleware import MAX_BYTES, error_response
from proximetry.web.request_metrics import RequestMetrics
from proximetry.web.searcher import MAX_PIXELS, Box, QueryImage, Searcher, read_query

log = logging.getLogger("proximetry.web")

T = TypeVar("T")
Form = TypeVar("Form", bound=BaseModel)

MAX_RESULTS, MAX_QUERIES, MAX_LISTED = 1000, 16, 500
_MAX_ID = 2**63 - 1
ImageId = Annotated[
    int,
    PlainSerializer(
        lambda item: item if item < 2**53 else str(item), return_type=int | str, when_used="json"
    ),
]
_MAX_CLASSES = 2000  # on the page
_STATIC = Path(__file__).parent / "static"
_DESCRIPTION = f"""Searches a gallery of images by their embeddings.

Errors are JSON, `{{"detail": MESSAGE}}`. A server with a token requires the header
`Authorization: Bearer TOKEN`. A busy server answers 503; try again after `Retry-After` seconds.
An upload may have up to {MAX_BYTES // 10**6} MB and {MAX_PIXELS // 10**6} million pixels."""

Scalar = str | int | float | bool | None


class ErrorResponse(BaseModel):
    """An error."""

    detail: str = Field(description="The message.")


class Item(BaseModel):
    """An image of the gallery."""

    id: ImageId = Field(description="Never reused. As text from 2⁵³, as on Milvus.")
    label: Scalar = Field(description="The class, if any.")
    file: str = Field(description="Path relative to the common folder of all images, or in full.")
    image: str | None = Field(description="URL of the image, relative to the server, if any.")
    details: dict[str, Scalar] = Field(description="Other metadata, by column.")


class Match(Item):
    """A result."""

    rank: int = Field(description="1 is the nearest.")
    similarity: float = Field(description="The cosine, or the negative Euclidean distance.")
    probability: float | None = Field(
        None, description="That it is of the query's class, if the embedder is calibrated."
    )
    match: bool | None = Field(None, description="Whether it reaches match_threshold.")


class PredictedClass(BaseModel):
    """The most frequent class of the results; ties go to the nearer image."""

    label: Scalar = Field(description="Null if no result has a class.")
    votes: int = Field(description="Number of results of this class.")
    neighbors: int = Field(description="Number of results that have a class.")


class Matches(BaseModel):
    """The nearest images, nearest first."""

    similarity: Literal["cosine", "euclidean"]
    match_threshold: float | None = Field(
        description="The similarity that a match needs, if the embedder is calibrated."
    )
    images: int = Field(description="Number of images in the gallery.")
    queries: list[Item | None] = Field(
        description="The query images, uploads first; null for uploads."
    )
    prediction: PredictedClass
    results: list[Match]


class SearchForm(BaseModel):
    """One or several query images, and the options of the search."""

    id: list[Annotated[int, Field(ge=0, le=_MAX_ID)]] = Field(
        [], max_length=MAX_QUERIES, description="Images of the gallery, excluded from the results."
    )
    box: list[str] = Field(
        [],
        max_length=MAX_QUERIES,
        description="LEFT,TOP,RIGHT,BOTTOM: search for this part of an image, in fractions of its "
        "width and height. One for each query image, uploads first; empty for a whole image.",
    )
    combine: Literal["mean", "max"] = Field(
        "mean",
        description="Several query images: similar to their mean, or to any of them (max).",
    )
    k: int = Field(10, ge=1, le=MAX_RESULTS, description="Number of results.")
    neighbors: int | None = Field(
        None, ge=1, description="Number of results that vote for the class; default: all."
    )
    where: list[str] = Field(
        [],
        max_length=100,
        description="COLUMN=VALUE: search only images with this value; several values of one "
        "column are combined with OR. Other operators: != < <= > >= and ^= (prefix). Or JSON: "
        '{"year": {">=": 1999}, "label": ["jay", "crow"]}.',
    )
    threshold: float | None = Field(
        None,
        allow_inf_nan=False,
        description="Exclude images with a smaller cosine or a larger Euclidean distance.",
    )


class ExplainForm(BaseModel):
    """A query image and an image of the gallery."""

    id: int | None = Field(None, ge=0, le=_MAX_ID, description="An image of the gallery.")
    box: str = Field("", description="The part of the query to explain, as for `/search`.")
    result: int = Field(ge=0, le=_MAX_ID, description="An image of the gallery.")


_LISTS = ("id", "box", "where")  # repeatable fields


def _request_body(form: type[BaseModel], several: bool) -> dict[str, Any]:
    """Return the request body for OpenAPI: the fields of a form, and uploads."""
    schema = form.model_json_schema()
    image: dict[str, Any] = {"type": "string", "format": "binary"}
    if several:
        image = {"type": "array", "items": image, "maxItems": MAX_QUERIES}
    image["description"] = "Image files, or pass id." if several else "An image file, or pass id."
    schema["properties"] = {"image": image, **schema["properties"]}
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}


class Map(BaseModel):
    """Images as points in the unit square; similar images are near each other."""

    state: Literal["ready", "computing"]
    seconds: float | None = Field(default=None, description="Computing time until now.")
    images: int = Field(description="Number of images in the gallery.")
    outdated: bool = Field(default=False, description="Whether a newer map is being computed.")
    ids: list[ImageId] = Field(
        default=[], description=f"Up to {MAX_POINTS}; a larger gallery is sampled."
    )
    x: list[float] = []
    y: list[float] = []
    label: list[int] = Field(default=[], description="Index of each class in labels, −1 for none.")
    labels: list[str] = Field(default=[], description="The classes, most frequent first.")


class ClassCount(BaseModel):
    """A class and its number of images."""

    name: str
    images: int


class ColumnInfo(BaseModel):
    """A column that `where` can filter by, described by a sample of the images."""

    name: str
    kind: Literal["number", "text"]
    values: list[str] = Field(description="Of a text column, if they are few.")
    minimum: float | None
    maximum: float | None


class GalleryInfo(BaseModel):
    """The gallery and its embedder."""

    name: str
    version: str
    images: int
    dim: int
    similarity: Literal["cosine", "euclidean"]
    index: str
    columns: list[ColumnInfo] = Field(description="Columns that `where` can filter by.")
    classes: list[ClassCount] = Field(description=f"Up to {_MAX_CLASSES}, most frequent first.")
    class_count: int
    suggested: list[ImageId] = Field(description="Ids of some images for the start page.")
    backbone: str
    image_size: list[int] = Field(description="Height and width; empty for vectors.")
    has_images: bool = Field(description="Whether items have images.")
    searches_images: bool = Field(description="Whether a query can be an uploaded image.")
    calibrated: bool = Field(description="Whether results have probabilities.")
    metrics: dict[str, Any] | None = Field(description="Metrics of the embedder's training run.")
    explains: bool = Field(description="Whether `/explain` supports the embedder.")
    limits: dict[str, int] = Field(description="The largest upload, in bytes and in pixels.")


ItemId = Annotated[int, PathParameter(ge=0, le=_MAX_ID, description="The id of an image.")]
_NOT_FOUND: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorResponse, "description": "No such id"}
}
_GONE: dict[int | str, dict[str, Any]] = {
    410: {"model": ErrorResponse, "description": "The file is missing or not an image"}
}
_UPLOAD: dict[int | str, dict[str, Any]] = {
    413: {"model": ErrorResponse, "description": "The upload is too large"},
    415: {"model": ErrorResponse, "description": "Not an image, damaged or too large"},
}
_COMMON: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorResponse, "description": "The token is missing or wrong"},
    422: {"model": ErrorResponse, "description": "Invalid request"},
    503: {"model": ErrorResponse, "description": "Busy"},
}


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
            classes=classes[:_MAX_CLASSES],
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


def make_app(source: Path | Gallery, *, full_paths: bool = False, wait: bool = True) -> FastAPI:
    """Open a gallery and return its application, to be wrapped in an `AccessMiddleware`.

    Args:
        source: the folder of the gallery, or an open gallery on Milvus.
        full_paths: show the full paths of images, not those relative to their common folder.
        wait: return after loading the embedder. Otherwise requests get 503 until it is loaded.
    """
    service = Service(source, full_paths)
    if wait:
        service.loading.result()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    async def check_loaded(request: Request) -> None:
        if not service.loading.done() and request.scope["route"].path != "/":
            seconds = round(time.monotonic() - service.started)
            raise HTTPException(503, f"loading the gallery, {seconds} s", {"Retry-After": "1"})

    app = FastAPI(
        title="Proximetry",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,  # its page loads scripts from other sites
        redoc_url=None,
        lifespan=lifespan,
        dependencies=[Depends(check_loaded)],
        responses=_COMMON,
    )
    app.state.service = service
    _handle_errors(app)
    _add_search(app, service)
    _add_items(app, service)
    _add_gallery(app, service)

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_STATIC / "index.html")

    app.mount("/static", StaticFiles(directory=_STATIC))
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: StarletteHTTPException) -> Response:
        detail = "not found" if error.detail == "Not Found" else str(error.detail)
        return error_response(error.status_code, detail, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(part for part in first["loc"][1:] if isinstance(part, str))
        value = "" if first["type"] == "missing" else f", got {format_value(first['input'])}"
        message = first["msg"][:1].lower() + first["msg"][1:]
        return error_response(422, f"{where}: {message}{value}")

    @app.exception_handler(UsageError)
    async def bad_request(request: Request, error: UsageError) -> Response:
        return error_response(422, shorten(str(error), 500))

    @app.exception_handler(ImageError)
    async def unreadable(request: Request, error: ImageError) -> Response:
        return error_response(415, f"the upload is {shorten(error.reason, 300)}")

    @app.exception_handler(MilvusError)
    async def unavailable(request: Request, error: MilvusError) -> Response:
        log.warning("%s", error)
        return error_response(503, "Milvus does not answer the request; see the server's log")

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # no client receives it

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(500, "internal error; see the server's log")


def _add_search(app: FastAPI, service: Service) -> None:
    @app.post(
        "/search",
        summary="Search for the images nearest to one or several images",
        openapi_extra={"requestBody": _request_body(SearchForm, several=True)},
        responses={**_NOT_FOUND, **_UPLOAD},
    )
    async def search(request: Request, response: Response) -> Matches:
        # Parsed here, because FastAPI takes as long to parse a form as the search itself.
        form = await request.form(max_files=MAX_QUERIES, max_fields=200)
        try:
            options = _parse_form(form, SearchForm)
            queries = _query_images(form.getlist("image"), options.id, options.box)
            where = _parse_where(options.where)
            answer = await service.searcher.search(queries, options.k, where, options.combine)
        finally:
            await form.close()
        times = {"wait": answer.wait, "model": answer.model, "search": answer.search}
        timing = ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in times.items())
        response.headers["Server-Timing"] = timing
        results = answer.results
        if options.threshold is not None:
            cosine = answer.similarity == "cosine"
            minimum = options.threshold - ROUNDING if cosine else -options.threshold
            results = [match for match in results if match["similarity"] >= minimum]
        prediction = vote(match["label"] for match in results[: options.neighbors])._asdict()
        return Matches.model_validate(
            {**answer._asdict(), "prediction": prediction, "results": results}
        )

    @app.post(
        "/explain",
        summary="Show which regions make two images similar, as a WebP image",
        openapi_extra={"requestBody": _request_body(ExplainForm, several=False)},
        response_class=Response,
        responses={200: {"content": {"image/webp": {}}}, **_NOT_FOUND, **_UPLOAD, **_GONE},
    )
    async def explain(request: Request) -> Response:
        form = await request.form(max_files=1, max_fields=10)
        try:
            options = _parse_form(form, ExplainForm)
            ids = [] if options.id is None else [options.id]
            (query,) = _query_images(form.getlist("image"), ids, [options.box], limit=1)
            content = await service.explain(query, options.result)
        finally:
            await form.close()
        return Response(content, media_type="image/webp")


def _query_images(
    uploads: list[Any], ids: list[int], boxes: list[str], limit: int = MAX_QUERIES
) -> list[QueryImage]:
    """Return the query images of a form: uploads first, then images of the gallery."""
    files = [upload for upload in uploads if isinstance(upload, UploadFile)]
    queries = [QueryImage(read=upload.file.read) for upload in files]
    queries += [QueryImage(item=item) for item in ids]
    if not queries:
        raise UsageError("pass an image, or the id of one in the gallery")
    if len(queries) > limit:
        raise UsageError(f"pass up to {pluralize(limit, 'query image')}, got {len(queries)}")
    if len(boxes) > len(queries):
        raise UsageError(f"{len(boxes)} boxes for {pluralize(len(queries), 'query image')}")
    return [
        query._replace(box=_parse_box(box))
        for query, box in zip(queries, chain(boxes, repeat("")), strict=False)
    ]


def _parse_box(text: str) -> Box | None:
    if not text:
        return None
    try:
        left, top, right, bottom = map(float, text.split(","))
    except ValueError:
        left = top = right = bottom = 0.0
    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
        raise UsageError(
            f"invalid box {format_value(text)}. Write LEFT,TOP,RIGHT,BOTTOM as fractions, such as "
            "0.1,0.2,0.5,0.6."
        )
    return left, top, right, bottom


def _parse_form(form: FormData, kind: type[Form]) -> Form:
    """Validate the fields of a form; empty fields are ignored."""
    fields = ["image", *kind.model_fields]
    values: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name not in fields:
            raise UsageError(f"no field {format_value(name)}{suggest(name, fields)}")
        if value and isinstance(value, UploadFile) != (name == "image"):
            raise UsageError(f"{name} must {'' if name == 'image' else 'not '}be a file")
        is_list = kind is SearchForm and name in _LISTS
        if value or name == "box":
            values[name] = [*values.get(name, []), value] if is_list else value
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise RequestValidationError(
            [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
        ) from None


def _parse_where(texts: list[str]) -> Where:
    """Return conditions that are written as COLUMN=VALUE, or as JSON."""
    documents = [text for text in texts if text.startswith("{")]
    where = parse_conditions([text for text in texts if not text.startswith("{")])
    for document in documents:
        try:
            conditions = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"where is not JSON: {error}") from None
        if repeated := where.keys() & conditions.keys():
            raise UsageError(f"two conditions of {sorted(repeated)[0]}. Combine them.")
        where |= conditions
    if "path" in where:
        raise UsageError("no column 'path' to filter by. Paths are private.")
    return where


def _add_items(app: FastAPI, service: Service) -> None:
    @app.get("/items", summary="Metadata of several images")
    async def get_items(
        ids: Annotated[
            str,
            Query(
                pattern=r"^\d{1,19}(,\d{1,19})*$",
                max_length=20 * MAX_LISTED,
                description=f"Up to {MAX_LISTED} ids, separated by commas; unknown ones are "
                "skipped.",
            ),
        ],
    ) -> list[Item]:
        numbers = [item for item in map(int, ids.split(",")) if item <= _MAX_ID][:MAX_LISTED]
        return [Item(**item) for item in await service.run(service.gallery.items, numbers)]

    @app.get("/items/{item}", summary="Metadata of an image", responses=_NOT_FOUND)
    async def get_item(item: ItemId) -> Item:
        gallery = await service.run(service.gallery.current)
        return Item(**await service.run(service.gallery.item, gallery, item))

    @app.get(
        "/items/{item}/image",
        summary="An image of the gallery, as JPEG or PNG",
        response_class=Response,
        responses={
            200: {"content": {"image/jpeg": {}, "image/png": {}}},
            304: {"description": "Not modified"},
            **_NOT_FOUND,
            **_GONE,
        },
    )
    async def get_image(
        request: Request,
        item: ItemId,
        size: Annotated[
            int, Query(ge=SIZES[0], le=SIZES[1], description="Maximum longer side in pixels.")
        ] = 512,
    ) -> Response:
        try:
            cached = request.headers.get("if-none-match")
            etag, image = await service.run(service.gallery.image, item, size, cached)
        except ImageError as error:
            reason = shorten(error.reason, 300)
            raise HTTPException(410, f"image {item} cannot be shown: {reason}") from None
        headers = {"Cache-Control": "private, no-cache", "ETag": etag}
        if image is None:
            return Response(None, 304, headers)
        return Response(image[0], 200, headers, media_type=image[1])


def _add_gallery(app: FastAPI, service: Service) -> None:
    @app.get(
        "/map",
        summary="The map of the gallery",
        responses={200: {"model": Map}, 202: {"model": Map, "description": "Not ready yet"}},
    )
    async def get_map() -> Response:
        try:
            status, content = await service.run(service.map)
        except MapError as error:
            raise HTTPException(503, str(error)) from None
        return Response(content, status, media_type="application/json")

    @app.get("/gallery", summary="Describe the gallery")
    async def get_gallery() -> GalleryInfo:
        return await service.run(service.describe)

    @app.get("/metrics", summary="Metrics, for Prometheus", response_class=PlainTextResponse)
    async def get_metrics(request: Request) -> PlainTextResponse:
        images = await service.run(service.gallery.count)
        metrics: RequestMetrics = request.scope.get("proximetry.metrics") or RequestMetrics()
        text = metrics.render(images, service.gallery.reloads)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.get("/healthz", summary="Health check")
    async def health() -> dict[str, str]:
        if not service.searcher.alive:
            raise HTTPException(503, "the search thread has stopped; restart the server")
        return {"status": "ok"}
