"""From pictures to vectors: reading in threads, evaluation preprocessing, batches."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from proximetry.models.preprocessing import Preprocessing

if TYPE_CHECKING:
    from proximetry.models.embedder import Embedder

ImageSource: TypeAlias = (
    "str | os.PathLike[str] | bytes | Image.Image | np.ndarray[Any, Any] | Tensor"
)

_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


def encode(
    embedder: "Embedder",
    images: Iterable[ImageSource],
    batch_size: int,
    device: str | torch.device | None,
    flip: bool,
    workers: int | None,
    progress: Callable[[int], None] | None,
) -> Tensor:
    """Do the work of `Embedder.encode`."""
    _refuse_one_image(images)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size!r}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers!r}")
    if flip and embedder.architecture.mirror:
        raise ValueError("this embedder looks at mirror images by itself: flip would add nothing")
    if device is not None:
        embedder.to(device)
    place = next(embedder.parameters()).device
    vectors: list[Tensor] = []
    done = 0
    threads = workers or min(8, os.cpu_count() or 1)
    with _evaluating(embedder), torch.inference_mode():
        for pixels in _batches(images, embedder.preprocessing, batch_size, threads):
            vectors.append(_embed(embedder, pixels.to(place), flip).cpu())
            done += len(pixels)
            if progress is not None:
                progress(done)
    if vectors:
        return torch.cat(vectors).clone()
    return torch.empty(0, embedder.dim * (2 if flip else 1))


def _embed(embedder: "Embedder", pixels: Tensor, flip: bool) -> Tensor:
    # A network in half precision takes pixels in half precision.
    kind = next(embedder.parameters()).dtype
    ready = embedder.preprocessing.normalise(pixels).to(kind)
    vectors: Tensor = embedder(ready).float()
    return torch.cat([vectors, embedder(ready.flip(3)).float()], 1) if flip else vectors


def read_pixels(source: ImageSource, preprocessing: Preprocessing) -> Tensor:
    """Read one picture as uint8 RGB [3, height, width], resized and cropped for evaluation."""
    from proximetry.data.decode import open_image

    if isinstance(source, Tensor):
        if source.dtype != torch.uint8:
            raise ValueError(f"an image tensor must be uint8 0…255, got {source.dtype}")
        if source.ndim not in (2, 3) or (source.ndim == 3 and source.shape[2] not in (1, 3, 4)):
            raise ValueError(
                f"an image tensor is [height, width, 3] or [height, width], got "
                f"{list(source.shape)}; channels go last (permute(1, 2, 0))"
            )
        source = source.cpu().numpy()
    image = resize_and_crop(open_image(source), preprocessing)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def resize_and_crop(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """Scale the short side to `resize`, then cut the centre; roundings are torchvision's."""
    width, height = image.size
    short, long = sorted((width, height))
    side = preprocessing.resize
    other = int(side * long / short)
    size = (side, other) if width <= height else (other, side)
    if size != image.size:
        image = image.resize(size, _FILTERS[preprocessing.interpolation])
    crop_height, crop_width = preprocessing.crop
    left, top = _margins(image.width, crop_width), _margins(image.height, crop_height)
    return image.crop((left, top, left + crop_width, top + crop_height))


def _margins(size: int, crop: int) -> int:
    """Where the crop starts; below zero when it is larger (Pillow then pads with black)."""
    return round((size - crop) / 2) if size >= crop else -((crop - size) // 2)


def _batches(
    images: Iterable[ImageSource], preprocessing: Preprocessing, size: int, threads: int
) -> Iterator[Tensor]:
    """Yield uint8 batches; the next one is being read while the network works on this one."""
    numbered = iter(enumerate(images))

    def read(item: tuple[int, ImageSource]) -> Tensor:
        try:
            return read_pixels(item[1], preprocessing)
        except (TypeError, ValueError) as error:
            raise ValueError(f"image {item[0]}: {error}") from error

    with ThreadPoolExecutor(threads) as pool:
        try:
            ahead = [pool.submit(read, item) for item in islice(numbered, size)]
            while ahead:
                batch = ahead
                ahead = [pool.submit(read, item) for item in islice(numbered, size)]
                yield torch.stack([future.result() for future in batch])
        finally:
            # After an error nobody waits for the rest.
            pool.shutdown(wait=False, cancel_futures=True)


def _refuse_one_image(images: object) -> None:
    one = isinstance(images, str | bytes | os.PathLike | Image.Image)
    if isinstance(images, np.ndarray | Tensor):
        one = images.ndim < 3 or (images.ndim == 3 and images.shape[-1] == 3)
    if one:
        raise ValueError(
            f"images must be a list of pictures, got one {type(images).__name__}: write [image]"
        )


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation, and every part back to what it was."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
