"""The HTTP API and the page, as one application."""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from proximetry import __version__
from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_value, shorten
from proximetry.data import ImageError
from proximetry.search import Gallery
from proximetry.search.duplicates import ROUNDING
from proximetry.search.milvus_client import MilvusError
from proximetry.search.prediction import vote
from proximetry.web.forms import (
    MAX_ID,
    MAX_QUERIES,
    ExplainForm,
    SearchForm,
    parse_form,
    parse_where,
    query_images,
    request_body,
)
from proximetry.web.gallery_map import MapError
from proximetry.web.live_gallery import SIZES
from proximetry.web.middleware import MAX_BYTES, error_response
from proximetry.web.request_metrics import RequestMetrics
from proximetry.web.responses import ErrorResponse, GalleryInfo, Item, Map, Matches
from proximetry.web.searcher import MAX_PIXELS
from proximetry.web.service import Service

log = logging.getLogger("proximetry.web")

MAX_LISTED = 500
_STATIC = Path(__file__).parent / "static"
_DESCRIPTION = f"""Searches a gallery of images by their embeddings.

Errors are JSON, `{{"detail": MESSAGE}}`. A server with a token requires the header
`Authorization: Bearer TOKEN`. A busy server answers 503; try again after `Retry-After` seconds.
An upload may have up to {MAX_BYTES // 10**6} MB and {MAX_PIXELS // 10**6} million pixels."""

ItemId = Annotated[int, PathParameter(ge=0, le=MAX_ID, description="The id of an image.")]
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


def make_app(source: Path | Gallery, *, full_paths: bool = False, wait: bool = True) -> FastAPI:
    """Open a gallery and return its application, to be wrapped in an `AccessMiddleware`.

    Args:
        source: the folder of the gallery, or an open one, on Milvus or a GPU.
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
        openapi_extra={"requestBody": request_body(SearchForm, several=True)},
        responses={**_NOT_FOUND, **_UPLOAD},
    )
    async def search(request: Request, response: Response) -> Matches:
        # Parsed here, because FastAPI takes as long to parse a form as the search itself.
        form = await request.form(max_files=MAX_QUERIES, max_fields=200)
        try:
            options = parse_form(form, SearchForm)
            queries = query_images(form.getlist("image"), options.id, options.box)
            where = parse_where(options.where)
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
        openapi_extra={"requestBody": request_body(ExplainForm, several=False)},
        response_class=Response,
        responses={200: {"content": {"image/webp": {}}}, **_NOT_FOUND, **_UPLOAD, **_GONE},
    )
    async def explain(request: Request) -> Response:
        form = await request.form(max_files=1, max_fields=10)
        try:
            options = parse_form(form, ExplainForm)
            ids = [] if options.id is None else [options.id]
            (query,) = query_images(form.getlist("image"), ids, [options.box], limit=1)
            content = await service.explain(query, options.result)
        finally:
            await form.close()
        return Response(content, media_type="image/webp")


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
        numbers = [item for item in map(int, ids.split(",")) if item <= MAX_ID][:MAX_LISTED]
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
