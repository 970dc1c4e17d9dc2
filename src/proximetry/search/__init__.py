"""Galleries: images, their vectors and an index on disk. Names are imported on first use."""

from typing import TYPE_CHECKING

from proximetry._util.imports import lazy_exports

if TYPE_CHECKING:
    from proximetry.search.duplicates import Duplicates
    from proximetry.search.gallery import Gallery
    from proximetry.search.image_sheets import contact_sheet
    from proximetry.search.indexing import index
    from proximetry.search.outliers import LabelError, Outlier
    from proximetry.search.prediction import Prediction
    from proximetry.search.search_result import SearchResult
    from proximetry.search.sync import Changes
    from proximetry.search.versions import Version

__all__ = [
    "Changes",
    "Duplicates",
    "Gallery",
    "LabelError",
    "Outlier",
    "Prediction",
    "SearchResult",
    "Version",
    "contact_sheet",
    "index",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "duplicates": ("Duplicates",),
        "gallery": ("Gallery",),
        "search_result": ("SearchResult",),
        "image_sheets": ("contact_sheet",),
        "indexing": ("index",),
        "outliers": ("LabelError", "Outlier"),
        "prediction": ("Prediction",),
        "sync": ("Changes",),
        "versions": ("Version",),
    },
    extra="search",
)
