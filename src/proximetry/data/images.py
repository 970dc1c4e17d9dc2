"""Read images, and resize and crop them for an embedder.

Any image file or array becomes an RGB image, or an error that names it. Training, evaluation and
encoding all use these functions, so they see the same bytes.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from proximetry._util.imports import import_optional
from proximetry.data.folders import open_file, read_member, split_shard_path

try:
    from PIL import Image, ImageFile, UnidentifiedImageError
except ModuleNotFoundError:
    import_optional("PIL", "images", "Reading images")

Interpolation: TypeAlias = Literal["bilinear", "bicubic"]
Stream: TypeAlias = io.BufferedReader | io.BytesIO
Size: TypeAlias = int | tuple[int, int]
"""The short side of scaled images, or their height and width."""
Source: TypeAlias = "str | os.PathLike[str] | bytes | Image.Image | np.ndarray[Any, Any]"

MAX_PIXELS = 89_478_485  # above it Pillow warns too
# The limit of JPEG. Pillow takes 20 bytes per row, so a long thin image takes much memory.
MAX_SIDE = 65_535

# Formats of untrusted files. Others start outside programs (EPS) or are rarely used.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "MPO", "JPEG2000", "AVIF", "HEIF")
# How HEIC files begin, after the size of the first box.
_HEIC = tuple(b"ftyp" + brand for brand in (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1"))

# Pillow decodes lazily and not thread-safely: lock while decoding PIL images of the caller.
_LOCKS = [Lock() for _ in range(64)]

_ORIENTATION = 0x0112
_T = Image.Transpose
_UPRIGHT = {
    2: _T.FLIP_LEFT_RIGHT,
    3: _T.ROTATE_180,
    4: _T.FLIP_TOP_BOTTOM,
    5: _T.TRANSPOSE,
    6: _T.ROTATE_270,
    7: _T.TRANSVERSE,
    8: _T.ROTATE_90,
}
# The turns that mirror columns, mirror rows, and swap the sides.
_LEFT_RIGHT = (_T.FLIP_LEFT_RIGHT, _T.ROTATE_180, _T.ROTATE_90, _T.TRANSVERSE)
_TOP_BOTTOM = (_T.FLIP_TOP_BOTTOM, _T.ROTATE_180, _T.ROTATE_270, _T.TRANSVERSE)
_SIDEWAYS = (_T.TRANSPOSE, _T.ROTATE_270, _T.TRANSVERSE, _T.ROTATE_90)


class ImageError(ValueError):
    """An image could not be read; names it and the reason.

    Attributes:
        transient: whether a retry may succeed: the system could not open or read the file.
    """

    def __init__(self, name: str, reason: str, transient: bool = False) -> None:
        super().__init__(name, reason)
        self.name, self.reason, self.transient = name, reason, transient

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def open_image(
    source: Source, *, max_pixels: int = MAX_PIXELS, size: Size | None = None
) -> Image.Image:
    """Read one image as upright RGB.

    Takes a path ("shard.tar::member" included), the bytes of a file, a PIL image or an array
    (H×W or H×W×C, uint8, uint16 or bool). Transparency is composited on white, EXIF orientation is
    applied, 16-bit samples are scaled to 8 bits, and only the first frame is read. Color profiles
    are not applied.

    With a ``size``, a large JPEG file is decoded at a half, a quarter or an eighth of its size, as
    long as that is at least twice the ``size``.

    Raises:
        ImageError: missing, unreadable, truncated, more than `max_pixels` pixels, or a side longer
            than 65 535. The size is read from the header, before anything is decoded.

    Examples:
        >>> open_image(np.zeros((4, 6), np.uint8)).size
        (6, 4)
    """
    name = _name(source)
    if isinstance(source, Image.Image | np.ndarray):
        image = _from_array(source, name) if isinstance(source, np.ndarray) else source
        _check_size(*image.size, name, max_pixels)
        with _LOCKS[id(image) // 16 % len(_LOCKS)]:
            return _to_upright_rgb(image, name)
    with _open_checked(source, max_pixels) as image:
        width, height = image.size
        if size is not None:
            minimum = 2 * (size if isinstance(size, int) else max(size))
            image.draft(None, (minimum, minimum))  # for JPEG only
        reduction = max(1, round(width / image.width))
        upright = _to_upright_rgb(image, name)
        if reduction > 1:
            # Its last row and column may show less than a whole pixel of the original.
            left, top, right, bottom = 0.0, 0.0, width / reduction, height / reduction
            turn = _turn(image)
            if turn in _LEFT_RIGHT:
                left, right = image.width - right, image.width - left
            if turn in _TOP_BOTTOM:
                top, bottom = image.height - bottom, image.height - top
            original = _OriginalSize((width, height), (left, top, right, bottom))
            if turn in _SIDEWAYS:
                original = _OriginalSize((height, width), (top, left, bottom, right))
            upright.reduced = original  # type: ignore[attr-defined]
        return upright


def thumbnail(source: Source, side: int) -> Image.Image:
    """Read one image, its longer side scaled down to at most `side` pixels."""
    image = open_image(source, size=side)
    original = _original_size(image)
    scale = min(1.0, side / max(original.size))
    size = [max(1, round(scale * length)) for length in original.size]
    return image.resize(size, Image.Resampling.BICUBIC, box=original.box, reducing_gap=2.0)


class _OriginalSize(NamedTuple):
    """The size of an original, and its box in an image decoded at a reduced size."""

    size: tuple[int, int]
    box: tuple[float, float, float, float]


def _original_size(image: Image.Image) -> _OriginalSize:
    return getattr(image, "reduced", _OriginalSize(image.size, (0, 0, *image.size)))


def image_size(file: str | os.PathLike[str]) -> tuple[int, int]:
    """Return width and height from the header of an image file, or raise an ImageError."""
    with _open_checked(file) as image:
        return image.size


def open_bytes(path: str) -> Stream:
    """Open an image file or a shard's member, or raise a transient ImageError."""
    try:
        name, member = split_shard_path(path)
        if not member:
            return open_file(name)
        return io.BytesIO(read_member(name, member))
    except FileNotFoundError as error:
        raise ImageError(path, "no such file", transient=True) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ImageError(path, f"cannot be opened: {reason}", transient=True) from error


@contextmanager
def _open_checked(
    source: str | os.PathLike[str] | bytes, max_pixels: int = MAX_PIXELS
) -> Iterator[Image.Image]:
    """Open a file of a supported format and size without decoding it, or raise an ImageError."""
    Image.init()
    name = _name(source)
    with io.BytesIO(source) if isinstance(source, bytes) else open_bytes(name) as stream:
        try:
            _register_heic(name, stream)
            formats = tuple(form for form in _FORMATS if form in Image.OPEN)
            image = Image.open(stream, formats=formats)
        except (ImageError, MemoryError):
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise ImageError(name, f"too large: {error}") from error
        except UnidentifiedImageError as error:
            names = ", ".join(formats)
            raise ImageError(name, f"not an image in a known format ({names})") from error
        except Exception as error:
            raise _decode_error(name, error) from error
        with image:
            # Pillow's parser of these takes quadratic time.
            if image.tile and image.tile[0][0] == "ppm_plain":
                raise ImageError(name, "plain PNM, pixels written as text; save it as binary PNM")
            _check_size(*image.size, name, max_pixels)
            yield image


def _register_heic(name: str, stream: Stream) -> None:
    """Let Pillow read HEIC files if this is one, or raise an ImageError."""
    start = stream.read(12)
    stream.seek(0)
    if start[4:] in _HEIC and "HEIF" not in Image.OPEN:
        try:
            import_optional("pillow_heif", "heic", "reading HEIC").register_heif_opener()
        except ModuleNotFoundError as error:
            raise ImageError(name, str(error)) from error


def _decode_error(name: str, error: Exception) -> ImageError:
    """Return the ImageError for an error of a parser, or of the system, which is transient."""
    if isinstance(error, OSError) and error.errno is not None:
        return ImageError(name, f"cannot be read: {error.strerror}", transient=True)
    return ImageError(name, f"damaged or truncated: {error}")


def check_interpolation(name: str) -> None:
    """Raise a ValueError for an unknown filter."""
    if name not in get_args(Interpolation):
        raise ValueError(f"interpolation must be 'bilinear' or 'bicubic', got {name!r}")


def scaled_size(width: int, height: int, size: Size, name: str = "image") -> tuple[int, int]:
    """Return width and height after scaling to a short side, or to (height, width).

    Raises:
        ImageError: the image is so narrow that it would have more than MAX_PIXELS pixels.
    """
    if not isinstance(size, int):
        return size[1], size[0]
    long = max(size, int(size * max(width, height) / min(width, height)))
    if size * long > MAX_PIXELS:
        raise ImageError(name, f"{width}×{height} pixels is too narrow to scale")
    return (size, long) if width <= height else (long, size)


def describe_size(size: Size) -> str:
    """Describe the size that images are scaled to."""
    return f"short side {size}" if isinstance(size, int) else f"{size[0]} × {size[1]}"


def resize_image(image: Image.Image, size: Size, interpolation: Interpolation) -> Image.Image:
    """Scale an image with Pillow, or raise an ImageError if it is too narrow."""
    original = _original_size(image)
    scaled = scaled_size(*original.size, size, _name(image))
    if scaled == image.size:
        return image
    return image.resize(scaled, Image.Resampling[interpolation.upper()], box=original.box)


def crop_size(crop: int | tuple[int, int]) -> tuple[int, int]:
    """Return height and width of a crop, which may be one side of a square."""
    height, width = (crop, crop) if isinstance(crop, int) else crop
    if height < 1 or width < 1:
        raise ValueError(f"crop must be positive, got {crop}")
    return height, width


def resize_and_center_crop(
    image: Image.Image, resize: Size, crop: int | tuple[int, int], interpolation: Interpolation
) -> Image.Image:
    """Scale an image to `resize`, then crop the center: a square or (height, width).

    Examples:
        >>> image = open_image(np.zeros((30, 60, 3), np.uint8))
        >>> resize_and_center_crop(image, 20, 16, "bicubic").size
        (16, 16)
    """
    check_interpolation(interpolation)
    height, width = crop_size(crop)
    scaled_width, scaled_height = scaled_size(*_original_size(image).size, resize, _name(image))
    if scaled_height < height or scaled_width < width:
        raise ImageError(
            _name(image),
            f"an image of {image.height}×{image.width} pixels becomes "
            f"{scaled_height}×{scaled_width}, too few for a crop of {height}×{width}. "
            f"Use a resize of {max(height, width) if isinstance(resize, int) else (height, width)}",
        )
    image = resize_image(image, resize, interpolation)
    # Halves are rounded to even, as torchvision does.
    top, left = round((image.height - height) / 2), round((image.width - width) / 2)
    return image.crop((left, top, left + width, top + height))


def center_crop_box(
    image: Image.Image, resize: Size, crop: int | tuple[int, int]
) -> tuple[float, float, float, float]:
    """Return the part of an image that `resize_and_center_crop` keeps: left, top, right, bottom."""
    height, width = crop_size(crop)
    scaled = scaled_size(*image.size, resize, _name(image))
    left, top = round((scaled[0] - width) / 2), round((scaled[1] - height) / 2)
    x, y = image.width / scaled[0], image.height / scaled[1]
    return left * x, top * y, (left + width) * x, (top + height) * y


def _name(source: Source) -> str:
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, bytes):
        return f"<{len(source)} bytes>"
    if isinstance(source, Image.Image):
        return str(getattr(source, "filename", "") or f"<{source.mode} image>")
    if isinstance(source, np.ndarray):
        return f"<array {source.shape} {source.dtype}>"
    raise TypeError(
        f"an image is a path, bytes, a PIL image or a NumPy array, not {type(source).__name__}"
    )


def _from_array(array: np.ndarray[Any, Any], name: str) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    color = array.ndim == 3 and array.shape[2] in (3, 4)
    if array.size == 0 or not (array.ndim == 2 or color):
        raise ImageError(name, "an array must be H×W, H×W×1, H×W×3 or H×W×4 (channels last)")
    if array.dtype == np.uint16:
        array = _sixteen_to_eight(array)
    elif array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    elif array.dtype != np.uint8:
        raise ImageError(name, "an array must be uint8, uint16 or bool; scale it to 0…255 first")
    return Image.fromarray(np.ascontiguousarray(array))


def _to_upright_rgb(image: Image.Image, name: str) -> Image.Image:
    """Decode an image and return a copy of it as upright RGB."""
    try:
        if isinstance(image, ImageFile.ImageFile):
            image.load()
        turn = _turn(image)
        upright = _to_rgb(image if turn is None else image.transpose(turn), name)
        upright.filename = name  # type: ignore[attr-defined]  # for errors from here on
        return upright
    except (ImageError, MemoryError):
        raise
    except Exception as error:
        raise _decode_error(name, error) from error


def _check_size(width: int, height: int, name: str, max_pixels: int) -> None:
    if width * height > max_pixels or max(width, height) > MAX_SIDE:
        limit = max_pixels if width * height > max_pixels else f"{MAX_SIDE} per side"
        raise ImageError(name, f"too large: {width}×{height} pixels, the limit is {limit}")
    if width == 0 or height == 0:
        raise ImageError(name, f"empty: {width}×{height} pixels")


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        return _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # the pixels are fine if the EXIF block is damaged
        return None


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_deep_to_eight(image, name)).convert("RGB")
    if image.mode == "LAB":
        from PIL import ImageCms

        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        return ImageCms.buildTransform(lab, srgb, "LAB", "RGB").apply(image)
    if image.has_transparency_data or image.mode in ("La", "RGBa"):
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    # convert() copies an image of this mode too, so the result never shares a file.
    return image.convert("RGB")


def _sixteen_to_eight(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    # 65535 / 257 = 255 exactly; adding half of it rounds.
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _deep_to_eight(image: Image.Image, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Scale integer samples from 16 bits; take floats as 0…1 or as 0…255."""
    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    if image.mode != "F" and low >= 0 and high <= 65535:
        return _sixteen_to_eight(values)
    if image.mode == "F" and low >= 0 and high <= 255:
        return np.rint(values * (255.0 if high <= 1 else 1.0)).astype(np.uint8)
    raise ImageError(
        name, f"mode {image.mode} with values from {low:g} to {high:g}: save it with 8 or 16 bits"
    )
