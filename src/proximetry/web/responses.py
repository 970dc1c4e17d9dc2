"""The responses of the HTTP API."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainSerializer

from proximetry.web.gallery_map import MAX_POINTS

MAX_CLASSES = 2000  # on the page
ImageId = Annotated[
    int,
    PlainSerializer(
        lambda item: item if item < 2**53 else str(item), return_type=int | str, when_used="json"
    ),
]
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
    classes: list[ClassCount] = Field(description=f"Up to {MAX_CLASSES}, most frequent first.")
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
