"""From images to vectors, batch by batch, whatever turns pixels into vectors."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._common import chunks, cores
from proximetry.models.preprocessing import ImageSource, Preprocessing

Array = npt.NDArray[Any]
OnError = Callable[[int, Exception], None]


def embed_images(
    embed: Callable[[Tensor], Tensor],
    images: Iterable[ImageSource],
    preprocessing: Preprocessing,
    *,
    device: torch.device,
    batch_size: int,
    concat_flip: bool,
    on_error: OnError | None,
    blame: Callable[[], str],
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the numbers of images and their vectors on the CPU, all of them finite.

    Args:
        embed: from uint8 [B, 3, H, W] to vectors [B, dim].
        images: see `Embedder.encode`.
        preprocessing: what `embed` takes.
        device: where it takes it.
        batch_size: images per pass.
        concat_flip: append the vector of the horizontal flip.
        on_error: called with the number of an image that cannot be read, and why, in order; it is
            then left out. None raises a ValueError.
        blame: says why a vector may not be finite, which is a ValueError.
    """
    for batch, pixels in _read_batches(images, preprocessing, batch_size, on_error):
        pixels = pixels.to(device)
        views = (pixels, pixels.flip(3)) if concat_flip else (pixels,)
        vectors = torch.cat([embed(view) for view in views], 1).cpu()
        finite = torch.isfinite(vectors).all(1).tolist()
        if not all(finite):
            place, name = batch[finite.index(False)]
            raise ValueError(
                f"the embedding of image {place}{name} has NaN or infinite values: {blame()}"
            )
        yield [place for place, _ in batch], vectors


def embed_tensors(
    embed: Callable[[Tensor], Tensor],
    tensors: Array | Tensor,
    *,
    device: torch.device,
    batch_size: int,
    blame: Callable[[], str],
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the numbers of vectors or other tensors and their embeddings, as `embed_images`."""
    for part in chunks(len(tensors), batch_size):
        batch = (
            torch.as_tensor(np.array(tensors[part]))
            if isinstance(tensors, np.ndarray)
            else tensors[part]
        )
        vectors = embed(batch.to(device)).cpu()
        finite = torch.isfinite(vectors).all(1).tolist()
        if not all(finite):
            place = part.start + finite.index(False)
            raise ValueError(
                f"the embedding of row {place} has NaN or infinite values: so has the row, or "
                f"{blame()}"
            )
        yield list(range(part.start, part.start + len(batch))), vectors


def _read_batches(
    images: Iterable[ImageSource], preprocessing: Preprocessing, size: int, on_error: OnError | None
) -> Iterator[tuple[list[tuple[int, str]], Tensor]]:
    """Yield numbers and names of images and a uint8 batch of them.

    The next batch is being read while the network works on this one.
    """
    numbered = iter(enumerate(images))

    def read(item: tuple[int, ImageSource]) -> tuple[tuple[int, str], Tensor | Exception]:
        place, image = item
        name = f" ({image})" if isinstance(image, str | os.PathLike) else ""
        try:
            return (place, name), preprocessing.pixels(image)
        except (TypeError, ValueError) as error:
            return (place, name), error

    pool = ThreadPoolExecutor(min(8, cores()))
    try:
        ahead = [pool.submit(read, item) for item in islice(numbered, size)]
        while ahead:
            batch = ahead
            ahead = [pool.submit(read, item) for item in islice(numbered, size)]
            kept: dict[tuple[int, str], Tensor] = {}
            for (place, name), found in (future.result() for future in batch):
                if isinstance(found, Tensor):
                    kept[place, name] = found
                elif on_error is None:
                    raise ValueError(f"image {place}: {found}") from found
                else:
                    on_error(place, found)  # in the thread of the caller, in order
            if kept:
                yield list(kept), torch.stack(list(kept.values()))
    finally:
        pool.shutdown(cancel_futures=True)  # after an error nobody waits for the rest
