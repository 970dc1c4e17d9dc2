"""The HTTP interface and the page, as one application."""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from proximetry import __version__
from proximetry._util.errors import UsageError, closest, shorten, shown
from proximetry._util.machine import cores
from proximetry.data import ImageError
from proximetry.search import Gallery
from proximetry.search.gallery import ROUNDING
from proximetry.search.rows import conditions
from proximetry.web.guard import MOST_BYTES
from proximetry.web.map import MOST, GalleryMap, MapError, MapMaker
from proximetry.web.searcher import (
    MOST_PIXELS,
    Answer,
    ChangedError,
    Conditions,
    GoneError,
    Searcher,
)
from proximetry.web.view import SIZES, About, View, plain

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

MOST_FOUND = 1000
_LARGEST_ID = 2**63 - 1
_MOST_CLASSES = 2000  # listed on the page
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_DESCRIPTION = f"""Searches a gallery of images by their embeddings.

Errors are JSON, `{{"detail": SENTENCE}}`. A server that was started with a token wants the header
`Authorization: Bearer TOKEN`. One that is busy answers 503; try again after `Retry-After` seconds.
An upload may have {MOST_BYTES // 10**6} MB and {MOST_PIXELS // 10**6} million pixels."""

Scalar = str | int | float | bool | None


class Problem(BaseModel):
    """What went wrong."""

    detail: str = Field(description="One sentence.")


class Item(BaseModel):
    """An image of the gallery."""

    id: int = Field(description="Given once and never again.")
    label: Scalar = Field(description="Its class, if it has one.")
    file: str = Field(description="Its path, from the folder that all images lie in.")
    image: str = Field(description="URL of its thumbnail, relative to the server.")
    details: dict[str, Scalar] = Field(description="Other metadata, by column.")


class Match(Item):
    """An image that was found."""

    rank: int = Field(description="1 is the nearest.")
    similarity: float = Field(description="The cosine, or the negative Euclidean distance.")


class Matches(BaseModel):
    """The nearest images, nearest first."""

    similarity: Literal["cosine", "euclidean"]
    images: int = Field(description="How many images the gallery has.")
    query: Item | None = Field(description="The image of the gallery that was searched for.")
    found: list[Match]


class SearchForm(BaseModel):
    """What to search for: an image, or the id of one in the gallery."""

    id: int | None = Field(
        None,
        ge=0,
        le=_LARGEST_ID,
        description="An image of the gallery, which is then not among those found.",
    )
    k: int = Field(10, ge=1, le=MOST_FOUND, description="How many to find.")
    where: list[str] = Field(
        [],
        max_length=100,
        description="COLUMN=VALUE: search only images with this value; of several for one column "
        "any will do.",
    )
    threshold: float | None = Field(
        None,
        allow_inf_nan=False,
        description="Exclude images with a smaller cosine or a larger Euclidean distance.",
    )

    @classmethod
    def described(cls) -> dict[str, Any]:
        """The body of a request, for OpenAPI."""
        schema = cls.model_json_schema()
        image = {"type": "string", "format": "binary", "description": "An image file; or give id."}
        schema["properties"] = {"image": image, **schema["properties"]}
        return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}


class Map(BaseModel):
    """Images as points in the unit square; near points are alike, distances mean little."""

    state: Literal["ready", "computing"]
    seconds: float | None = Field(None, description="For how long it has been computed by now.")
    images: int = Field(description="How many images the gallery has.")
    outdated: bool = Field(False, description="Whether a newer map is being computed.")
    ids: list[int] = Field([], description=f"Up to {MOST}; of more images a sample is drawn.")
    x: list[float] = []
    y: list[float] = []
    label: list[int] = Field([], description="The number of its class, −1 for none.")
    labels: list[str] = Field([], description="The classes, most frequent ones first.")


class Class(BaseModel):
    """A class, and how many images it has."""

    name: str
    images: int


class Limits(BaseModel):
    """The largest upload."""

    bytes: int
    pixels: int


class GalleryInfo(BaseModel):
    """The gallery and its embedder."""

    name: str
    version: str
    images: int
    dim: int
    similarity: Literal["cosine", "euclidean"]
    index: str
    columns: list[str] = Field(description="Columns that `where` can filter by.")
    classes: list[Class] = Field(description=f"The {_MOST_CLASSES} most frequent ones at most.")
    class_count: int
    suggested: list[int] = Field(description="Ids of some images to begin with.")
    backbone: str
    image_size: list[int]
    metrics: dict[str, Any] | None = Field(description="Of the run that trained the embedder.")
    limits: Limits


class Health(BaseModel):
    """The server answers."""

    status: Literal["ok"]


ItemId = Annotated[int, PathParameter(ge=0, le=_LARGEST_ID, description="The id of an image.")]
_NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "No such id"}}
_COMMON: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "The token is missing or wrong"},
    422: {"model": Problem, "description": "Invalid request"},
    503: {"model": Problem, "description": "Busy"},
}


class Service:
    """What the interface works with; closed at the end."""

    def __init__(self, path: Path) -> None:
        self.view = View(path)
        self.searcher = Searcher(self.view)
        self.maps = MapMaker(path)
        self._pool = ThreadPoolExecutor(cores(), thread_name_prefix="images")
        self._map: tuple[tuple[str, str], bytes] | None = None

    def start(self) -> None:
        """Load what the first clients would wait for."""
        self.searcher.warm_up()
        about = self.view.about()
        self.maps.want(about.gallery, about.version)

    def close(self) -> None:
        """End all threads and processes."""
        self.maps.close()
        self.searcher.close()
        self._pool.shutdown(cancel_futures=True)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do work that reads files, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def item(self, item: int) -> dict[str, Any]:
        """Return the metadata of an image."""
        (record,) = self.view.items(self.view.current(), [item])
        return record

    def describe(self) -> bytes:
        """Return the description of the gallery."""
        about = self.view.about()
        gallery, embedder = about.gallery, about.gallery.embedder
        classes = list(about.classes.items())
        return _dump(
            {
                "name": self.view.path.resolve().name,
                "version": about.version,
                "images": len(gallery),
                "dim": gallery.dim,
                "similarity": gallery.similarity,
                "index": gallery.index,
                "columns": _columns(gallery),
                "classes": [{"name": n, "images": c} for n, c in classes[:_MOST_CLASSES]],
                "class_count": len(classes),
                "suggested": about.suggested,
                "backbone": embedder.architecture.backbone,
                "image_size": list(embedder.preprocessing.crop),
                "metrics": plain(embedder.metrics),
                "limits": {"bytes": MOST_BYTES, "pixels": MOST_PIXELS},
            }
        )

    def map(self) -> tuple[int, bytes]:
        """Return the map, or how far it is."""
        about = self.view.about()
        gallery = about.gallery
        found = self.maps.want(gallery, about.version)
        if found is None:
            seconds = round(time.monotonic() - self.maps.begun, 1)
            return 202, _dump({"state": "computing", "seconds": seconds, "images": len(gallery)})
        key = found.version, about.version
        if self._map is None or self._map[0] != key:
            self._map = key, _drawn(gallery, about, found)
        return 200, self._map[1]


def _drawn(gallery: Gallery, about: About, found: GalleryMap) -> bytes:
    there = np.isin(found.ids, gallery.ids())  # some may have been removed since
    ids, points = found.ids[there], found.points[there].astype(float).round(4)
    number = {name: place for place, name in enumerate(about.classes)}
    try:
        labels = gallery.rows(ids, ["label"])["label"]
    except UsageError:  # some were removed a moment ago
        return _drawn(gallery, about, found)
    return _dump(
        {
            "state": "ready",
            "images": len(gallery),
            "outdated": found.version != about.version,
            "ids": ids.tolist(),
            "x": points[:, 0].tolist(),
            "y": points[:, 1].tolist(),
            "label": [-1 if label is None else number.get(str(label), -1) for label in labels],
            "labels": list(number),
        }
    )


def _columns(gallery: Gallery) -> list[str]:
    """Return the columns for filters; paths are private."""
    return [name for name in gallery.columns if name != "path"]


def _conditions(gallery: Gallery, words: list[str]) -> Conditions:
    found = conditions(words)
    for name in found:
        if name not in _columns(gallery):
            there = ", ".join(_columns(gallery))
            raise UsageError(f"the gallery has no column {shown(name)}; there is {there}")
    return tuple((name, tuple(values)) for name, values in sorted(found.items()))


def _dump(content: Any) -> bytes:
    # Names of files need not be text; as escapes they are ASCII all the same.
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _reply(content: bytes, status: int = 200, **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(content, status, named, "application/json")


def make_app(path: Path) -> FastAPI:
    """Return the application for a gallery, to be put behind a `guard.Guard`.

    The gallery is opened, and its embedder loaded, before this returns.
    """
    service = Service(path)
    service.start()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="Proximetry",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,  # its page needs scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        responses=_COMMON,
    )
    app.state.service = service
    _handle_errors(app)
    _add_search(app, service)
    _add_items(app, service)
    _add_gallery(app, service)
    _add_page(app)
    return app


def _handle_errors(app: FastAPI) -> None:
    """Return errors as JSON."""

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: StarletteHTTPException) -> Response:
        detail = "not found" if error.detail == "Not Found" else str(error.detail)
        return _reply(_dump({"detail": detail}), error.status_code, **dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        given = "" if first["type"] == "missing" else f", got {shown(first['input'])}"
        message = first["msg"][:1].lower() + first["msg"][1:]
        return _reply(_dump({"detail": f"{where}: {message}{given}"}), 422)

    @app.exception_handler(UsageError)
    async def bad_request(request: Request, error: UsageError) -> Response:
        return _reply(_dump({"detail": shorten(str(error), 500)}), 422)

    @app.exception_handler(ImageError)
    async def unreadable(request: Request, error: ImageError) -> Response:
        return _reply(_dump({"detail": f"the upload is {shorten(error.reason, 300)}"}), 415)

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody receives it

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _reply(_dump({"detail": "something went wrong; the server's log says what"}), 500)


def _add_search(app: FastAPI, service: Service) -> None:
    @app.post(
        "/search",
        summary="Find the images that are nearest to an image",
        openapi_extra={"requestBody": SearchForm.described()},
        responses={
            200: {"model": Matches},
            **_NOT_FOUND,
            413: {"model": Problem, "description": "Too large an upload"},
            415: {"model": Problem, "description": "No image, a damaged or too large one"},
        },
    )
    async def search(request: Request) -> Response:
        # Read here and not by FastAPI, which would take as long as all the rest.
        form = await request.form(max_files=1, max_fields=200)
        try:
            wanted = _read(SearchForm, form)
            image = form.get("image") or None
            if isinstance(image, str):
                raise UsageError("image must be a file")
            if (image is None) == (wanted.id is None):
                raise UsageError("give an image to search for, or the id of one in the gallery")
            answer = await _search(service, wanted, image)
        finally:
            await form.close()
        return _found(answer, wanted.threshold)


def _read(model: type[M], form: FormData) -> M:
    """Check the fields of a form; those that are empty are not there."""
    for name in form:
        if name != "image" and name not in model.model_fields:
            fields = ["image", *model.model_fields]
            raise UsageError(f"there is no field {shown(name)}{closest(name, fields)}")
    given: dict[str, Any] = {name: form[name] for name in form if form[name]}
    if "where" in form:
        given["where"] = [one for one in form.getlist("where") if one]
    for name in given:
        if name != "image" and any(isinstance(one, UploadFile) for one in form.getlist(name)):
            raise UsageError(f"{shorten(name, 40)} must not be a file")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise RequestValidationError(
            [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        ) from None


async def _search(service: Service, wanted: SearchForm, image: UploadFile | None) -> Answer:
    try:
        where = _conditions(service.view.opened, wanted.where)
    except UsageError:  # of what was open; its newest version may have the column
        where = _conditions(await service.run(service.view.current), wanted.where)
    try:
        if image is not None:
            return await service.searcher.search_image(image.file.read, wanted.k, where)
        assert wanted.id is not None
        return await service.searcher.search_item(wanted.id, wanted.k, where)
    except GoneError:
        raise HTTPException(404, f"no image of the gallery has the id {wanted.id}") from None
    except ChangedError:
        raise HTTPException(
            503, "the gallery was built anew just now; try again", {"Retry-After": "1"}
        ) from None


def _add_items(app: FastAPI, service: Service) -> None:
    @app.get(
        "/items/{item}",
        summary="Metadata of an image",
        responses={200: {"model": Item}, **_NOT_FOUND},
    )
    async def get_item(item: ItemId) -> Response:
        try:
            record = await service.run(service.item, item)
        except UsageError:
            raise HTTPException(404, f"no image of the gallery has the id {item}") from None
        return _reply(_dump(record))

    @app.get(
        "/items/{item}/image",
        summary="An image of the gallery, as JPEG or PNG",
        response_class=Response,
        responses={
            200: {"content": {"image/jpeg": {}, "image/png": {}}},
            304: {"description": "The client has it already"},
            **_NOT_FOUND,
            410: {"model": Problem, "description": "Its file is gone, or no image any more"},
        },
    )
    async def get_image(
        request: Request,
        item: ItemId,
        size: Annotated[
            int,
            Query(ge=SIZES[0], le=SIZES[1], description="Pixels of the longer side, at most."),
        ] = 512,
    ) -> Response:
        try:
            known = request.headers.get("if-none-match")
            mark, picture = await service.run(service.view.picture, item, size, known)
        except ImageError as error:
            raise HTTPException(
                410, f"image {item} cannot be shown: {shorten(error.reason, 300)}"
            ) from None
        except UsageError:
            raise HTTPException(404, f"no image of the gallery has the id {item}") from None
        headers = {"Cache-Control": "private, no-cache", "ETag": mark}
        if picture is None:
            return Response(None, 304, headers)
        return Response(picture.content, 200, headers, picture.media_type)


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
        return _reply(content, status)

    @app.get("/gallery", summary="Describe the gallery", responses={200: {"model": GalleryInfo}})
    async def get_gallery() -> Response:
        return _reply(await service.run(service.describe))

    @app.get(
        "/healthz", summary="Whether searches are answered", responses={200: {"model": Health}}
    )
    async def health() -> Response:
        if not service.searcher.alive:
            raise HTTPException(503, "searches are not answered any more")
        return _reply(b'{"status":"ok"}')


def _found(answer: Answer, threshold: float | None) -> Response:
    found = answer.found
    if threshold is not None:
        least = threshold - ROUNDING if answer.similarity == "cosine" else -threshold
        found = [one for one in found if one["similarity"] >= least]
    content = {
        "similarity": answer.similarity,
        "images": answer.images,
        "query": answer.query,
        "found": found,
    }
    spent = {"wait": answer.wait, "model": answer.model, "search": answer.search}
    timing = ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in spent.items())
    return _reply(_dump(content), Server_Timing=timing)


def _add_page(app: FastAPI) -> None:
    """The page: files of this package alone, read once."""
    files = {
        file.name: file.read_bytes()
        for file in resources.files("proximetry.web").joinpath("static").iterdir()
        if Path(file.name).suffix in _KINDS
    }

    def send(request: Request, name: str) -> Response:
        content = files.get(name)
        if content is None:
            raise HTTPException(404, "not found")
        mark = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {"Cache-Control": "no-cache", "ETag": mark}
        if request.headers.get("if-none-match") == mark:
            return Response(None, 304, headers)
        return Response(content, 200, headers, _KINDS[Path(name).suffix])

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return send(request, "index.html")

    @app.get("/static/{name}", include_in_schema=False)
    async def static(request: Request, name: str) -> Response:
        return send(request, name)
