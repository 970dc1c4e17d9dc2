"""Embed images or tensors batch by batch, with any function from pixels to vectors."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from proximetry._util.machine import cores
from proximetry._util.tensors import chunks
from proximetry.models.preprocessing import ImageSource, Input, Tensors

OnError = Callable[[int, Exception], None]
_Labels = list[tuple[int, str]]
"""Index and description of each item of a batch."""


def embed_images(
    embed: Callable[[Tensor], Tensor],
    images: Iterable[ImageSource],
    preprocessing: Input,
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
    if isinstance(preprocessing, Tensors) and isinstance(images, np.ndarray | Tensor):
        batches = _slice(images, batch_size)
    else:
        batches = _read(images, preprocessing, batch_size, on_error)
    for labels, pixels in batches:
        pixels = pixels.to(device)
        views = (pixels, pixels.flip(3)) if concat_flip else (pixels,)
        vectors = torch.cat([embed(view) for view in views], 1).cpu()
        finite = torch.isfinite(vectors).all(1).tolist()
        if not all(finite):
            _, label = labels[finite.index(False)]
            raise ValueError(f"the embedding of {label} has NaN or infinite values: {blame()}")
        yield [index for index, _ in labels], vectors


def _slice(rows: np.ndarray | Tensor, size: int) -> Iterator[tuple[_Labels, Tensor]]:
    for part in chunks(len(rows), size):
        batch = (
            torch.as_tensor(np.array(rows[part])) if isinstance(rows, np.ndarray) else rows[part]
        )
        yield [(part.start + i, f"row {part.start + i}") for i in range(len(batch))], batch


def _read(
    images: Iterable[ImageSource], preprocessing: Input, size: int, on_error: OnError | None
) -> Iterator[tuple[_Labels, Tensor]]:
    """Yield uint8 batches of images; reads one batch ahead."""
    numbered = iter(enumerate(images))

    def read(item: tuple[int, ImageSource]) -> tuple[tuple[int, str], Tensor | Exception]:
        index, image = item
        name = f" ({image})" if isinstance(image, str | os.PathLike) else ""
        try:
            return (index, f"image {index}{name}"), preprocessing.pixels(image)
        except (TypeError, ValueError) as error:
            return (index, ""), error

    pool = ThreadPoolExecutor(min(8, cores()))
    try:
        ahead = [pool.submit(read, item) for item in islice(numbered, size)]
        while ahead:
            batch = ahead
            ahead = [pool.submit(read, item) for item in islice(numbered, size)]
            readable: dict[tuple[int, str], Tensor] = {}
            for label, result in (future.result() for future in batch):
                if isinstance(result, Tensor):
                    readable[label] = result
                elif on_error is None:
                    raise ValueError(f"image {label[0]}: {result}") from result
                else:
                    on_error(label[0], result)  # in the calling thread
            if readable:
                yield list(readable), torch.stack(list(readable.values()))
    finally:
        pool.shutdown(cancel_futures=True)
