"""Images to embed, by what was named, and the files that embeddings are written to."""

import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proximetry._common import atomic_write, need

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Image = tuple[str, str | None]
"""A path, and the class where the image comes from a folder of class folders or a table."""


def find_images(words: Iterable[str]) -> list[Image]:
    """Return the images that are meant by files, folders, tables and shards."""
    return [image for word in words for image in _images_of(Path(word).expanduser())]


def _images_of(path: Path) -> list[Image]:
    from proximetry.data import open_dataset, resolve_source
    from proximetry.data.folders import is_image

    if not path.exists():
        raise ValueError(f"there is no image or folder {path}")
    if path.is_file() and is_image(path.name):
        return [(str(path), None)]
    name, root = resolve_source(path.absolute())  # a path, even if it is called like a dataset
    if name == "folder":
        return _images_below(path)
    catalog = open_dataset(name, root)
    return [(catalog.file(row), catalog.labels[row]) for row in range(len(catalog))]


def _images_below(folder: Path) -> list[Image]:
    """All images of a folder, with classes if all of them lie in class folders."""
    from proximetry.data.folders import files_below, is_image, scan_folder

    files = [path for path in files_below(folder) if is_image(path.name)]
    if not files or any(path.parent == folder for path in files):
        return [(str(path), None) for path in files]
    paths, labels, _, _ = scan_folder(folder)
    return [(str(folder / path), label) for path, label in zip(paths, labels, strict=True)]


@dataclass(frozen=True)
class Embedded:
    """Embeddings and the images they belong to."""

    images: Sequence[Image]
    vectors: "npt.NDArray[np.float32]"

    @property
    def paths(self) -> list[str]:
        """The path of each image."""
        return [path for path, _ in self.images]

    @property
    def labels(self) -> list[str | None]:
        """The class of each image; nothing if none is known."""
        labels = [label for _, label in self.images]
        return labels if any(labels) else []


def _npz(embedded: Embedded, out: Path) -> None:
    import numpy as np

    arrays: dict[str, Any] = {"vectors": embedded.vectors, "paths": np.array(embedded.paths)}
    if embedded.labels:
        arrays["labels"] = np.array([label or "" for label in embedded.labels])
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    atomic_write(out, buffer.getvalue())


def _npy(embedded: Embedded, out: Path) -> None:
    import numpy as np

    beside = {"paths": embedded.paths} | ({"labels": embedded.labels} if embedded.labels else {})
    atomic_write(out.with_suffix(".json"), json.dumps(beside, indent=1).encode())
    buffer = io.BytesIO()
    np.save(buffer, embedded.vectors)
    atomic_write(out, buffer.getvalue())


def _parquet(embedded: Embedded, out: Path) -> None:
    arrow = need("pyarrow", "parquet", "Writing Parquet")
    parquet = need("pyarrow.parquet", "parquet", "Writing Parquet")
    flat = arrow.array(embedded.vectors.ravel())
    columns = {"path": arrow.array(embedded.paths, arrow.string())}
    if embedded.labels:
        columns["label"] = arrow.array(embedded.labels, arrow.string())
    columns["vector"] = arrow.FixedSizeListArray.from_arrays(flat, embedded.vectors.shape[1])
    buffer = io.BytesIO()
    parquet.write_table(arrow.table(columns), buffer)
    atomic_write(out, buffer.getvalue())


WRITERS: dict[str, Callable[[Embedded, Path], None]] = {
    ".npz": _npz,
    ".npy": _npy,
    ".parquet": _parquet,
}


def find_writer(out: Path) -> Callable[[Embedded, Path], None]:
    """Return what writes this kind of file; refuse what cannot be written, before the work."""
    if out.suffix not in WRITERS:
        raise ValueError(f"--out {out} must end in {', '.join(WRITERS)}")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if out.suffix == ".parquet":
        need("pyarrow", "parquet", "Writing Parquet")
    return WRITERS[out.suffix]
