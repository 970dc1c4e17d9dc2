"""Embed images or tensors batch by batch, with any function from pixels to vectors."""

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
    """Yield indices of images and their vectors on the CPU.

    Args:
        embed: maps uint8 [B, 3, H, W] to vectors [B, dim].
        images: see `Embedder.encode`.
        preprocessing: of the images.
        device: device of `embed`.
        batch_size: images per batch.
        concat_flip: append the vector of the horizontal flip.
        on_error: called with the index of an unreadable image and the error, in order; the image
            is skipped. None raises a ValueError.
        blame: explains vectors that are not finite, in a ValueError.
    """
    for batch, pixels in _read_batches(images, preprocessing, batch_size, on_error):
        pixels = pixels.to(device)
        views = (pixels, pixels.flip(3)) if concat_flip else (pixels,)
        vectors = torch.cat([embed(view) for view in views], 1).cpu()
        bad = _first_nonfinite(vectors)
        if bad is not None:
            index, name = batch[bad]
            raise ValueError(
                f"the embedding of image {index}{name} has NaN or infinite values: {blame()}"
            )
        yield [index for index, _ in batch], vectors


def embed_tensors(
    embed: Callable[[Tensor], Tensor],
    tensors: Array | Tensor,
    *,
    device: torch.device,
    batch_size: int,
    blame: Callable[[], str],
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield indices of vectors or other tensors and their embeddings, as `embed_images`."""
    for part in chunks(len(tensors), batch_size):
        batch = (
            torch.as_tensor(np.array(tensors[part]))
            if isinstance(tensors, np.ndarray)
            else tensors[part]
        )
        vectors = embed(batch.to(device)).cpu()
        bad = _first_nonfinite(vectors)
        if bad is not None:
            raise ValueError(
                f"the embedding of row {part.start + bad} has NaN or infinite values: so has the "
                f"row, or {blame()}"
            )
        yield list(range(part.start, part.start + len(batch))), vectors


def _first_nonfinite(vectors: Tensor) -> int | None:
    finite = torch.isfinite(vectors).all(1).tolist()
    return None if all(finite) else finite.index(False)


def _read_batches(
    images: Iterable[ImageSource], preprocessing: Preprocessing, size: int, on_error: OnError | None
) -> Iterator[tuple[list[tuple[int, str]], Tensor]]:
    """Yield indices and names of images and a uint8 batch of them; reads one batch ahead."""
    numbered = iter(enumerate(images))

    def read(item: tuple[int, ImageSource]) -> tuple[tuple[int, str], Tensor | Exception]:
        index, image = item
        name = f" ({image})" if isinstance(image, str | os.PathLike) else ""
        try:
            return (index, name), preprocessing.pixels(image)
        except (TypeError, ValueError) as error:
            return (index, name), error

    pool = ThreadPoolExecutor(min(8, cores()))
    try:
        ahead = [pool.submit(read, item) for item in islice(numbered, size)]
        while ahead:
            batch = ahead
            ahead = [pool.submit(read, item) for item in islice(numbered, size)]
            readable: dict[tuple[int, str], Tensor] = {}
            for (index, name), result in (future.result() for future in batch):
                if isinstance(result, Tensor):
                    readable[index, name] = result
                elif on_error is None:
                    raise ValueError(f"image {index}: {result}") from result
                else:
                    on_error(index, result)  # in the calling thread
            if readable:
                yield list(readable), torch.stack(list(readable.values()))
    finally:
        pool.shutdown(cancel_futures=True)
