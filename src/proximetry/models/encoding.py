"""Embed images or tensors in batches, with any function from pixels to vectors."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from proximetry._util.tensors import chunks
from proximetry.data.loader import parallel_map
from proximetry.models.preprocessing import ImageSource, Input, Tensors

OnError = Callable[[int, Exception], None]


def embed_images(
    embed: Callable[[Tensor], Tensor],
    images: Iterable[ImageSource],
    preprocessing: Input,
    *,
    device: torch.device,
    batch_size: int,
    concat_flip: bool,
    on_error: OnError | None,
    explain_nonfinite: Callable[[], str],
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield indices of images and their vectors on the CPU; arguments as in `Embedder.encode`.

    `embed` maps uint8 [B, 3, H, W] to vectors [B, dim] on `device`; `explain_nonfinite` returns
    the cause of NaN or infinite values, for a ValueError.
    """
    for done, names, pixels in _batches(images, preprocessing, batch_size, on_error):
        if pixels is not None:
            pixels = pixels.to(device)
            views = (pixels, pixels.flip(3)) if concat_flip else (pixels,)
            vectors = torch.cat([embed(view) for view in views], 1).cpu()
            finite = torch.isfinite(vectors).all(1).tolist()
            if not all(finite):
                name = list(names.values())[finite.index(False)]
                reason = explain_nonfinite()
                raise ValueError(f"the embedding of {name} has NaN or infinite values: {reason}")
            yield list(names), vectors
        if progress is not None:
            progress(done)


def _batches(
    images: Iterable[ImageSource], preprocessing: Input, size: int, on_error: OnError | None
) -> Iterator[tuple[int, dict[int, str], Tensor | None]]:
    """Yield the number of images read, and names by index and pixels of the readable ones."""
    if isinstance(preprocessing, Tensors) and isinstance(images, np.ndarray | Tensor):
        for part in chunks(len(images), size):
            names = {row: f"row {row}" for row in range(part.start, part.stop)}
            rows = images[part]
            rows = torch.as_tensor(np.array(rows) if isinstance(rows, np.ndarray) else rows)
            yield part.stop, names, rows
        return
    with closing(parallel_map(partial(_read, preprocessing), images, prefetch=size)) as results:
        numbered = enumerate(results)
        while batch := list(islice(numbered, size)):
            names, pixels = dict[int, str](), list[Tensor]()
            for index, (name, result) in batch:
                if not isinstance(result, Exception):
                    names[index] = f"image {index}{name}"
                    pixels.append(torch.from_numpy(result).movedim(-1, 0))
                elif on_error is None:
                    raise ValueError(f"image {index}: {result}") from result
                else:
                    on_error(index, result)
            yield batch[-1][0] + 1, names, torch.stack(pixels) if pixels else None


def _read(preprocessing: Input, image: ImageSource) -> tuple[str, np.ndarray | Exception]:
    name = f" ({image})" if isinstance(image, str | os.PathLike) else ""
    try:
        # Channels last, as images are in memory: NumPy arrays lose other layouts between processes.
        return name, preprocessing.pixels(image).movedim(0, -1).numpy()
    except (TypeError, ValueError) as error:
        return name, error
