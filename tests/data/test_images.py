"""All supported image formats, and damaged files of every kind."""

import errno
import io
import os
import pickle
import socket
import struct
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile, features
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from proximetry.data import ImageError, images, open_image, resize_and_center_crop
from proximetry.data.folders import is_image
from proximetry.data.images import image_size, resize_image, scaled_size, thumbnail

RED, BLUE = (220, 30, 40), (20, 40, 200)


def halves(mode="RGB", size=(20, 12)):
    """Left half red, right half blue."""
    image = Image.new("RGB", size, RED)
    image.paste(BLUE, (size[0] // 2, 0, *size))
    return image.convert(mode)


def encoded(image, form, **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("form", "options", "tolerance"),
    [
        ("PNG", {}, 0),
        ("BMP", {}, 0),
        ("TIFF", {}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("PPM", {}, 0),
        ("GIF", {}, 3),
        ("JPEG", {"quality": 95, "subsampling": 0}, 8),
        ("WEBP", {"lossless": True}, 0),
    ],
)
def test_formats(tmp_path, form, options, tolerance):
    image = halves()
    file = tmp_path / "image.bin"
    image.save(file, form, **options)
    for source in (file, str(file), file.read_bytes()):
        out = open_image(source)
        assert out.mode == "RGB"
        assert out.size == (20, 12)
        error = np.abs(np.asarray(out).astype(int) - np.asarray(image).astype(int))
        assert error.max() <= tolerance


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGB", "CMYK", "YCbCr", "HSV", "LAB"])
def test_modes(mode):
    image = Image.new("RGB", (6, 4), (255, 255, 255))
    if mode == "LAB":
        from PIL import ImageCms

        profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        image = ImageCms.profileToProfile(image, *profiles, outputMode="LAB")
    else:
        image = image.convert(mode)
    out = np.asarray(open_image(image))
    assert out.shape == (4, 6, 3)
    assert out.min() >= 252
    if mode == "CMYK":
        out = open_image(encoded(halves("CMYK"), "JPEG", quality=95))
        assert np.abs(np.asarray(out)[6, 3].astype(int) - RED).max() <= 8


def test_one_bit_png():
    bits = np.eye(5, 9, dtype=bool)
    data = encoded(Image.fromarray(bits), "PNG")
    assert Image.open(io.BytesIO(data)).mode == "1"
    assert (np.asarray(open_image(data)) == 255 * bits[:, :, None]).all()


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_scale_to_eight(form):
    values = np.array([[0, 128, 129, 257, 32896, 65407, 65535]], dtype=np.uint16)
    out = np.asarray(open_image(encoded(Image.fromarray(values), form)))
    expected = np.round(values / 65535 * 255).astype(np.uint8)
    assert (out == expected[:, :, None]).all()
    assert (np.asarray(open_image(values)) == expected[:, :, None]).all()
    big = Image.frombytes("I;16B", (7, 1), values.astype(">u2").tobytes())
    for image in (big, Image.fromarray(values.astype(np.int32))):
        assert (np.asarray(open_image(image)) == expected[:, :, None]).all()


def test_float_images():
    unit = Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype=np.float32))
    assert np.asarray(open_image(unit))[0, :, 0].tolist() == [0, 128, 255]
    bytes_like = Image.fromarray(np.array([[0.0, 99.6, 255.0]], dtype=np.float32))
    assert np.asarray(open_image(bytes_like))[0, :, 0].tolist() == [0, 100, 255]
    for bad in (-1.0, 300.0, float("nan")):
        with pytest.raises(ImageError, match="mode F"):
            open_image(Image.fromarray(np.array([[bad]], dtype=np.float32)))


def expected_on_white(rgba):
    alpha = rgba[..., 3:].astype(float) / 255
    return rgba[..., :3] * alpha + 255 * (1 - alpha)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF"])
def test_transparency_is_composited_on_white(form):
    rgba = np.random.default_rng(0).integers(0, 256, (8, 9, 4), dtype=np.uint8)
    options = {"lossless": True, "exact": True} if form == "WEBP" else {}
    out = np.asarray(open_image(encoded(Image.fromarray(rgba), form, **options)))
    assert np.abs(out - expected_on_white(rgba)).max() <= 1


def test_gray_with_alpha_and_premultiplied():
    la = Image.new("LA", (3, 2), (0, 0))
    assert np.asarray(open_image(la)).min() == 255
    assert np.asarray(open_image(la.convert("La"))).min() == 255
    half = Image.new("RGBA", (3, 2), (200, 0, 0, 128)).convert("RGBa")
    assert np.abs(np.asarray(open_image(half))[0, 0].astype(int) - (227, 127, 127)).max() <= 2


def test_palette_with_transparency():
    image = Image.new("P", (4, 4), 0)
    image.putpalette([10, 20, 30, 200, 100, 50] + [0] * 762)
    image.putpixel((1, 1), 1)
    for form in ("PNG", "GIF"):
        out = np.asarray(open_image(encoded(image, form, transparency=0)))
        assert out[0, 0].tolist() == [255, 255, 255]
        assert out[1, 1].tolist() == [200, 100, 50]
    out = np.asarray(open_image(encoded(halves(), "PNG", transparency=RED)))
    assert out[0, 0].tolist() == [255, 255, 255]
    assert tuple(out[0, -1]) == BLUE


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation(form, orientation):
    upright = np.random.default_rng(1).integers(0, 256, (3, 2, 3), dtype=np.uint8)
    upright = upright.repeat(16, 0).repeat(16, 1)
    # How a camera stores a scene for each tag: the inverse of the viewer's transform.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    quality = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}
    image = Image.fromarray(np.ascontiguousarray(stored))
    out = np.asarray(open_image(encoded(image, form, exif=exif, **quality.get(form, {}))))
    assert out.shape == upright.shape
    assert np.abs(out.astype(int) - upright.astype(int)).max() <= (12 if form == "JPEG" else 0)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_orientation_is_applied_with_damaged_exif():
    # Orientation 6, and a rational without a value, which Pillow reads but cannot write again.
    tags = [(0x0112, 3, 1, 6 << 16), (0x0131, 12, 1, 0)]
    entries = b"".join(struct.pack(">HHII", *tag) for tag in tags)
    exif = b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", len(tags)) + entries + bytes(4)
    assert open_image(encoded(halves(), "JPEG", exif=exif)).size == (12, 20)
    broken = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\xff\xff"
    assert open_image(encoded(halves(), "JPEG", exif=broken)).size == (20, 12)


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (5, 5), c) for c in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.asarray(open_image(data))[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
@pytest.mark.parametrize("keep", [0.05, 0.5, 0.9])
def test_truncated(tmp_path, form, keep):
    noise = np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), form)
    file = tmp_path / "cut.img"
    file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ImageError) as caught:
        open_image(file)
    assert caught.value.name == str(file)
    assert str(file) in str(caught.value)


def test_not_an_image(tmp_path):
    text = tmp_path / "notes.jpg"
    text.write_text("not an image")
    with pytest.raises(ImageError, match=r"notes\.jpg: not an image in a known format"):
        open_image(text)
    with pytest.raises(ImageError, match="not an image"):
        open_image(b"")
    with pytest.raises(ImageError, match="no such file"):
        open_image(tmp_path / "nowhere.png")
    data = encoded(halves(), "EPS")
    assert b"%!PS" in data
    with pytest.raises(ImageError, match="not an image in a known format"):
        open_image(data)
    for kind in (b"P1", b"P2", b"P3"):
        with pytest.raises(ImageError, match="plain PNM"):
            open_image(kind + b" 1 1 " + b"255 " * (kind != b"P1") + b"# \n" * 9 + b"1 1 1\n")
    with pytest.raises(TypeError, match="not int"):
        open_image(3)


def test_special_files_are_never_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.png")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket.png")
    os.symlink("/dev/zero", "device.png")
    os.mkdir("folder.png")
    for kind in ("pipe", "socket", "device", "folder"):
        for read in (open_image, image_size):
            with pytest.raises(ImageError, match=f"cannot be opened: .*{kind}, not a") as caught:
                read(f"{kind}.png")
            assert caught.value.transient


@pytest.mark.skipif(not features.check("avif"), reason="Pillow without AVIF")
def test_parser_errors_become_image_errors():
    rng = np.random.default_rng(0)
    data = encoded(Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)), "AVIF")
    raised = set()
    for _ in range(150):
        damaged = bytearray(data)
        for place in rng.integers(0, len(data), 4):
            damaged[place] = rng.integers(256)
        try:
            Image.open(io.BytesIO(damaged)).load()
        except Exception as error:
            raised.add(type(error))
            with pytest.raises(ImageError) as caught:
                open_image(bytes(damaged))
            assert not caught.value.transient
    assert RuntimeError in raised


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.EMFILE, "Too many open files"), True),
        (OSError("broken data stream"), False),
        (RuntimeError("x"), False),
        (IndexError("x"), False),
    ],
)
@pytest.mark.parametrize("place", ["PIL.Image.open", "PIL.ImageFile.ImageFile.load"])
def test_system_errors_are_transient(monkeypatch, error, passing, place):
    def fail(*_, **__):
        raise error

    data = encoded(halves(), "PNG")
    monkeypatch.setattr(place, fail)
    with pytest.raises(ImageError, match="cannot be read" if passing else "damaged") as caught:
        open_image(data)
    assert caught.value.transient == passing
    assert pickle.loads(pickle.dumps(caught.value)).transient == passing


def png_header(width, height):
    """A PNG whose header declares a size, almost without pixels."""

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 60_000])
def test_decompression_bomb_is_rejected_by_its_header(side):
    with pytest.raises(ImageError, match="too large"):
        open_image(png_header(side, side))


def test_limit_can_be_set():
    data = encoded(halves(), "PNG")
    assert open_image(data, max_pixels=240).size == (20, 12)
    for source in (data, halves(), np.asarray(halves())):
        with pytest.raises(ImageError, match="20×12 pixels, the limit is 239"):
            open_image(source, max_pixels=239)


def test_arrays():
    rng = np.random.default_rng(3)
    gray = rng.integers(0, 256, (4, 5), dtype=np.uint8)
    assert (np.asarray(open_image(gray)) == gray[:, :, None]).all()
    assert (np.asarray(open_image(gray[:, :, None])) == gray[:, :, None]).all()
    color = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    assert (np.asarray(open_image(color[:, ::-1])) == color[:, ::-1]).all()
    assert np.asarray(open_image(np.eye(3, dtype=bool)))[0, 0, 0] == 255
    for shape in ((3, 8, 8), (5,), (0, 4, 3)):
        with pytest.raises(ImageError, match="channels last"):
            open_image(np.zeros(shape, np.uint8))
    with pytest.raises(ImageError, match="uint8, uint16 or bool"):
        open_image(np.zeros((4, 4, 3), np.float32))
    image = halves()
    open_image(image).putpixel((0, 0), (1, 2, 3))  # a copy
    assert image.getpixel((0, 0)) == RED


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 64))
def test_scaled_size(width, height, short_side):
    wide, tall = scaled_size(width, height, short_side)
    assert min(wide, tall) == short_side
    assert scaled_size(height, width, short_side) == (tall, wide)
    # The aspect ratio is kept, rounded down as in torchvision.
    assert max(wide, tall) == int(short_side * max(width, height) / min(width, height))


@given(
    size=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    resize=st.integers(1, 40),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
    data=st.data(),
)
def test_resize_and_center_crop_equals_torchvision(size, resize, interpolation, data):
    crop = [data.draw(st.integers(1, resize)) for _ in range(2)]
    shape = data.draw(st.sampled_from([(resize,), (resize, resize + 7), (resize, resize)]))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    to = shape if len(shape) == 2 else resize
    found = resize_and_center_crop(image, to, tuple(crop), interpolation)
    scaled = tv.resize(image, shape, InterpolationMode[interpolation.upper()], antialias=True)
    assert np.array_equal(found, tv.center_crop(scaled, crop))


def test_crop_larger_than_the_image_is_rejected():
    image = Image.new("RGB", (60, 40))
    with pytest.raises(ValueError, match=r"20×30.*resize of 24"):
        resize_and_center_crop(image, 20, (24, 16), "bicubic")
    assert resize_and_center_crop(image, 20, (16, 24), "bicubic").size == (24, 16)
    with pytest.raises(ValueError, match="crop must be positive, got 0"):
        resize_and_center_crop(image, 20, 0, "bicubic")
    with pytest.raises(ValueError, match="'bilinear' or 'bicubic', got 'box'"):
        resize_and_center_crop(image, 20, 16, "box")


def test_narrow_image_is_rejected_without_allocating_memory(tmp_path):
    Image.new("1", (1, 65_535)).save(tmp_path / "line.png")  # would be 315 MB
    image = open_image(tmp_path / "line.png")
    for scale in (
        lambda: resize_image(image, 40, "bicubic"),
        lambda: resize_and_center_crop(image, 40, 32, "bicubic"),
    ):
        with pytest.raises(ImageError, match=r"line\.png: 1×65535 pixels is too narrow to scale"):
            scale()


@pytest.mark.parametrize("size", [(1, 40_000_000), (40_000_000, 1)])
def test_long_side_is_rejected_before_decoding(tmp_path, monkeypatch, size):
    Image.new("1", size).save(tmp_path / "line.png")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("decoded"))
    with pytest.raises(ImageError, match="too large"):
        open_image(tmp_path / "line.png")


@pytest.fixture(scope="module", params=range(1, 9))
def large_jpeg(request, tmp_path_factory):
    """A structured JPEG file of 1601×1205 pixels, with an EXIF orientation."""
    draw = np.random.default_rng(0)
    image = Image.fromarray(draw.integers(0, 256, (12, 16, 3), np.uint8))
    fine = np.asarray(image.resize((1601, 1205), Image.Resampling.BICUBIC))
    exif = Image.Exif()
    exif[0x0112] = request.param
    file = tmp_path_factory.mktemp("large") / "large.jpg"
    Image.fromarray(fine).save(file, quality=92, exif=exif)
    return file


def test_thumbnails_decode_large_jpeg_files_at_a_reduced_size(large_jpeg, monkeypatch):
    expected = open_image(large_jpeg)
    expected.thumbnail((100, 100))
    finish, decoded = images._to_upright_rgb, []

    def finished(image, name):
        decoded.append(image.size)
        return finish(image, name)

    monkeypatch.setattr(images, "_to_upright_rgb", finished)
    small = thumbnail(large_jpeg, 100)
    assert decoded == [(401, 302)]
    assert small.size == expected.size
    assert np.abs(np.asarray(small, float) - np.asarray(expected, float)).mean() < 1  # gray levels
    assert thumbnail(large_jpeg, 5000).size == open_image(large_jpeg).size


def test_large_jpeg_files_are_decoded_at_the_size_that_scaling_needs(large_jpeg):
    whole = open_image(large_jpeg)
    for size, part in [(64, 8), (150, 4), (200, 2), (400, 1), ((150, 60), 4), ((64, 64), 8)]:
        image = open_image(large_jpeg, size=size)
        assert min(image.size) == -(-1205 // part) >= 2 * np.max(size)
        reduced = np.asarray(resize_image(image, size, "bicubic"), float)
        expected = np.asarray(resize_image(whole, size, "bicubic"), float)
        assert reduced.shape == expected.shape
        assert np.abs(reduced - expected).mean() < 0.6  # gray levels
        again = open_image(large_jpeg.read_bytes(), size=size)
        assert np.array_equal(np.asarray(again), np.asarray(image))
        with pytest.raises(ImageError, match="too large: 1601×1205"):
            open_image(large_jpeg, size=size, max_pixels=10**6)


def test_all_scaling_functions_give_the_same_bytes_of_a_large_jpeg(large_jpeg, tmp_path):
    from proximetry.data import Catalog, CenterCrop, PixelCache
    from proximetry.data.loader import ImageLoader
    from proximetry.models import Preprocessing

    catalog = Catalog((str(large_jpeg),), ("a",), ("all",))
    cache = PixelCache.build(catalog, 64, tmp_path, interpolation="bicubic")
    (batch,) = ImageLoader(catalog, 64, "bicubic", batch_size=1).batches([np.arange(1)])
    assert np.array_equal(cache[0], batch.tensor(0).numpy())
    kept = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic"}
    seen = Preprocessing(resize=64, crop=(56, 56), **kept).pixels(large_jpeg)
    assert np.array_equal(CenterCrop(56)(cache, [0])[0].numpy(), seen.numpy())


HEIC = b"\0\0\0\x1cftypheic" + bytes(100)


def test_heic_without_the_extra_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    with pytest.raises(ImageError, match="HEIC needs pillow_heif: install the extra 'heic'"):
        open_image(HEIC)


@pytest.mark.parametrize("suffix", [".heic", ".jpg"])
def test_heic_is_read_by_its_content(tmp_path, suffix):
    pillow_heif = pytest.importorskip("pillow_heif")
    image = Image.new("RGB", (40, 20), (200, 40, 40))
    pillow_heif.from_pillow(image).save(tmp_path / "photo.heic", quality=90)
    path = (tmp_path / "photo.heic").rename(tmp_path / f"photo{suffix}")
    for source in (path, path.read_bytes()):
        read = open_image(source)
        assert (read.mode, read.size) == ("RGB", (40, 20))
        assert np.abs(np.asarray(read, int) - np.asarray(image, int)).max() < 8
    assert is_image("photo.HEIC")


def test_damaged_heic_is_an_image_error():
    pytest.importorskip("pillow_heif")
    with pytest.raises(ImageError):
        open_image(HEIC)
