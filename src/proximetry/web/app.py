"""The HTTP API and the page, as one application."""

import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from proximetry import __version__
from proximetry._util.errors import UsageError, suggest
from proximetry._util.formatting import format_value, shorten
from proximetry._util.machine import cores
from proximetry.data import ImageError, open_image
from proximetry.models.explain import is_explainable
from proximetry.search.conditions import parse_conditions
from proximetry.search.duplicates import ROUNDING
from proximetry.search.prediction import vote
from proximetry.web.gallery_map import MAX_POINTS, MapError, MapMaker
from proximetry.web.live_gallery import SIZES, LiveGallery, to_json_value
from proximetry.web.middleware import MAX_BYTES, error_response
from proximetry.web.searcher import MAX_PIXELS, Conditions, Searcher

T = TypeVar("T")
Form = TypeVar("Form", bound=BaseModel)

MAX_RESULTS = 1000
_MAX_ID = 2**63 - 1
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

    id: int = Field(description="Never reused.")
    label: Scalar = Field(description="The class, if any.")
    file: str = Field(description="Path relative to the common folder of all images.")
    image: str = Field(description="URL of the thumbnail, relative to the server.")
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
    query: Item | None = Field(description="The query, if it is an image of the gallery.")
    prediction: PredictedClass
    results: list[Match]


class QueryForm(BaseModel):
    """A query: an image, or the id of one in the gallery."""

    id: int | None = Field(
        None, ge=0, le=_MAX_ID, description="An image of the gallery, excluded from the results."
    )

    @classmethod
    def request_body(cls) -> dict[str, Any]:
        """Return the request body for OpenAPI."""
        schema = cls.model_json_schema()
        image = {"type": "string", "format": "binary", "description": "An image file, or pass id."}
        schema["properties"] = {"image": image, **schema["properties"]}
        return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}


class SearchForm(QueryForm):
    """A query and the options of its search."""

    k: int = Field(10, ge=1, le=MAX_RESULTS, description="Number of results.")
    where: list[str] = Field(
        [],
        max_length=100,
        description="COLUMN=VALUE: search only images with this value; several values of one "
        "column are combined with OR.",
    )
    threshold: float | None = Field(
        None,
        allow_inf_nan=False,
        description="Exclude images with a smaller cosine or a larger Euclidean distance.",
    )


class ExplainForm(QueryForm):
    """A query and an image of the gallery."""

    result: int = Field(ge=0, le=_MAX_ID, description="An image of the gallery.")


class Map(BaseModel):
    """Images as points in the unit square; similar images are near each other."""

    state: Literal["ready", "computing"]
    seconds: float | None = Field(default=None, description="Computing time until now.")
    images: int = Field(description="Number of images in the gallery.")
    outdated: bool = Field(default=False, description="Whether a newer map is being computed.")
    ids: list[int] = Field(
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


class GalleryInfo(BaseModel):
    """The gallery and its embedder."""

    name: str
    version: str
    images: int
    dim: int
    similarity: Literal["cosine", "euclidean"]
    index: str
    columns: list[str] = Field(description="Columns that `where` can filter by.")
    classes: list[ClassCount] = Field(description=f"Up to {_MAX_CLASSES}, most frequent first.")
    class_count: int
    suggested: list[int] = Field(description="Ids of some images for the start page.")
    backbone: str
    image_size: list[int]
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

    def __init__(self, path: Path) -> None:
        self.gallery = LiveGallery(path)
        self._pool = ThreadPoolExecutor(cores(), thread_name_prefix="images")
        self.searcher = Searcher(self.gallery, self._pool)
        self.maps = MapMaker()
        self._map: tuple[tuple[str, str], bytes] | None = None
        self._explainer = ThreadPoolExecutor(1, thread_name_prefix="explain")
        self.searcher.warm_up()
        _is_explainable(self.gallery.current().embedder)  # before the first page
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

    async def explain(self, query: bytes | int, result: int) -> bytes:
        """Return a picture of the similarity of an upload or an image to another, as WebP."""

        def draw() -> bytes:
            gallery = self.gallery.current()
            source = self.gallery.path_of(gallery, query) if isinstance(query, int) else query
            other = self.gallery.path_of(gallery, result)
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
            name=self.gallery.path.resolve().name,
            version=gallery.version,
            images=len(gallery),
            dim=gallery.dim,
            similarity=gallery.similarity,
            index=gallery.index,
            columns=[name for name in gallery.columns if name != "path"],
            classes=classes[:_MAX_CLASSES],
            class_count=len(classes),
            suggested=summary.suggested,
            backbone=embedder.architecture.backbone,
            image_size=list(embedder.preprocessing.crop),
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
            exists = np.isin(current.ids, gallery.ids())  # the map may be of an earlier version
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


_is_explainable = lru_cache(maxsize=1)(is_explainable)


def make_app(path: Path) -> FastAPI:
    """Open a gallery and return its application, to be wrapped in an `AccessMiddleware`."""
    service = Service(path)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="Proximetry",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,  # its page loads scripts from other sites
        redoc_url=None,
        lifespan=lifespan,
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
        where = ".".join(str(part) for part in first["loc"][1:])
        value = "" if first["type"] == "missing" else f", got {format_value(first['input'])}"
        message = first["msg"][:1].lower() + first["msg"][1:]
        return error_response(422, f"{where}: {message}{value}")

    @app.exception_handler(UsageError)
    async def bad_request(request: Request, error: UsageError) -> Response:
        return error_response(422, shorten(str(error), 500))

    @app.exception_handler(ImageError)
    async def unreadable(request: Request, error: ImageError) -> Response:
        return error_response(415, f"the upload is {shorten(error.reason, 300)}")

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # no client receives it

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(500, "internal error; see the server's log")


def _add_search(app: FastAPI, service: Service) -> None:
    @app.post(
        "/search",
        summary="Search for the images nearest to an image",
        openapi_extra={"requestBody": SearchForm.request_body()},
        responses={**_NOT_FOUND, **_UPLOAD},
    )
    async def search(request: Request, response: Response) -> Matches:
        # Parsed here, because FastAPI takes as long to parse a form as the search itself.
        form = await request.form(max_files=1, max_fields=200)
        try:
            query, image = _parse_form(form, SearchForm), form.get("image")
            where = _parse_conditions(query.where)
            if isinstance(image, UploadFile) and query.id is None:
                answer = await service.searcher.search_image(image.file.read, query.k, where)
            elif not image and query.id is not None:
                answer = await service.searcher.search_item(query.id, query.k, where)
            else:
                raise UsageError("pass an image, or the id of one in the gallery")
        finally:
            await form.close()
        times = {"wait": answer.wait, "model": answer.model, "search": answer.search}
        timing = ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in times.items())
        response.headers["Server-Timing"] = timing
        results = answer.results
        if query.threshold is not None:
            cosine = answer.similarity == "cosine"
            minimum = query.threshold - ROUNDING if cosine else -query.threshold
            results = [match for match in results if match["similarity"] >= minimum]
        prediction = vote(match["label"] for match in results)._asdict()
        return Matches.model_validate(
            {**answer._asdict(), "prediction": prediction, "results": results}
        )

    @app.post(
        "/explain",
        summary="Show which regions make two images similar, as a WebP image",
        openapi_extra={"requestBody": ExplainForm.request_body()},
        response_class=Response,
        responses={200: {"content": {"image/webp": {}}}, **_NOT_FOUND, **_UPLOAD, **_GONE},
    )
    async def explain(request: Request) -> Response:
        form = await request.form(max_files=1, max_fields=10)
        try:
            query, image = _parse_form(form, ExplainForm), form.get("image")
            if isinstance(image, UploadFile) and query.id is None:
                content = await service.explain(await image.read(), query.result)
            elif not image and query.id is not None:
                content = await service.explain(query.id, query.result)
            else:
                raise UsageError("pass an image, or the id of one in the gallery")
        finally:
            await form.close()
        return Response(content, media_type="image/webp")


def _parse_form(form: FormData, kind: type[Form]) -> Form:
    """Validate the fields of a form; empty fields are ignored."""
    fields = ["image", *kind.model_fields]
    values: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name not in fields:
            raise UsageError(f"no field {format_value(name)}{suggest(name, fields)}")
        if value and isinstance(value, UploadFile) != (name == "image"):
            raise UsageError(f"{name} must {'' if name == 'image' else 'not '}be a file")
        if value:
            values[name] = [*values.get(name, []), value] if name == "where" else value
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise RequestValidationError(
            [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
        ) from None


def _parse_conditions(where: list[str]) -> Conditions:
    parsed = parse_conditions(where)
    if "path" in parsed:
        raise UsageError("no column 'path' to filter by. Paths are private.")
    if any(isinstance(values, dict) for values in parsed.values()):
        raise UsageError("the search page filters by COLUMN=VALUE only")
    return tuple((name, tuple(values)) for name, values in sorted(parsed.items()))


def _add_items(app: FastAPI, service: Service) -> None:
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

    @app.get("/healthz", summary="Health check")
    async def health() -> dict[str, str]:
        if not service.searcher.alive:
            raise HTTPException(503, "the search thread has stopped; restart the server")
        return {"status": "ok"}
