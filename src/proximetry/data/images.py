"""Reading images, and the one rule by which they are resized and cropped."""

from PIL import Image

from proximetry.data.decode import ImageError, open_image
from proximetry.data.pixels import scaled_size

__all__ = [
    "ImageError",
    "center_offset",
    "open_image",
    "resize_and_center_crop",
    "resize_short_side",
    "scaled_size",
]

_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def resize_short_side(image: Image.Image, short_side: int, interpolation: str) -> Image.Image:
    """Scale an image so that its shorter side is `short_side`."""
    size = scaled_size(*image.size, short_side)
    return image if size == image.size else image.resize(size, _FILTERS[interpolation])


def center_offset(size: int, crop: int) -> int:
    """Return where a crop in the centre starts; halves go to even, as in torchvision."""
    return round((size - crop) / 2)


def resize_and_center_crop(
    image: Image.Image, resize: int, crop: tuple[int, int], interpolation: str
) -> Image.Image:
    """Scale the shorter side to `resize`, then crop (height, width) in the centre."""
    image = resize_short_side(image, resize, interpolation)
    height, width = crop
    if image.height < height or image.width < width:
        raise ValueError(
            f"the image becomes {image.height}×{image.width} pixels, too few for a crop of "
            f"{height}×{width}; use a resize of {max(height, width)}"
        )
    left, top = center_offset(image.width, width), center_offset(image.height, height)
    return image.crop((left, top, left + width, top + height))
