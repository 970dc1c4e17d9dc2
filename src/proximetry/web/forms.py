"""The forms that the HTTP API accepts."""

import json
from itertools import chain, repeat
from typing import Annotated, Any, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.datastructures import FormData, UploadFile

from proximetry._util.errors import UsageError, suggest
from proximetry._util.formatting import format_value, pluralize
from proximetry.search.conditions import Where, parse_conditions
from proximetry.web.searcher import Box, QueryImage

Form = TypeVar("Form", bound=BaseModel)

MAX_RESULTS, MAX_QUERIES = 1000, 16
MAX_ID = 2**63 - 1


class SearchForm(BaseModel):
    """One or several query images, and the options of the search."""

    id: list[Annotated[int, Field(ge=0, le=MAX_ID)]] = Field(
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

    id: int | None = Field(None, ge=0, le=MAX_ID, description="An image of the gallery.")
    box: str = Field("", description="The part of the query to explain, as for `/search`.")
    result: int = Field(ge=0, le=MAX_ID, description="An image of the gallery.")


_LISTS = ("id", "box", "where")  # repeatable fields


def request_body(form: type[BaseModel], several: bool) -> dict[str, Any]:
    """Return the request body for OpenAPI: the fields of a form, and uploads."""
    schema = form.model_json_schema()
    image: dict[str, Any] = {"type": "string", "format": "binary"}
    if several:
        image = {"type": "array", "items": image, "maxItems": MAX_QUERIES}
    image["description"] = "Image files, or pass id." if several else "An image file, or pass id."
    schema["properties"] = {"image": image, **schema["properties"]}
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}


def query_images(
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


def parse_form(form: FormData, kind: type[Form]) -> Form:
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


def parse_where(texts: list[str]) -> Where:
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
