import errno
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proximetry.data import Catalog, ImageError, PixelCache, open_image
from proximetry.data.cache import estimate
from proximetry.data.images import open_bytes
from tests.processes import Process


def make_images(root, count=8, seed=0):
    rng = np.random.default_rng(seed)
    for i in range(count):
        file = root / f"class{i % 2}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        size = rng.integers(10, 40, 2)
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(file)
    return Catalog.from_folder(root)


@pytest.fixture
def catalog(tmp_path):
    return make_images(tmp_path / "images")


@pytest.fixture
def home(tmp_path):
    return tmp_path / "cache"


def stores(home):
    return [p for p in home.iterdir() if p.is_dir() and p.name != "contents"]


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def reference(file, short_side, interpolation="bicubic"):
    image = open_image(file)
    scale = short_side / min(image.size)
    size = tuple(max(short_side, int(s * scale + 1e-9)) for s in image.size)
    return np.asarray(image.resize(size, Image.Resampling[interpolation.upper()]))


@pytest.mark.parametrize(("short_side", "interpolation"), [(16, "bicubic"), (31, "bilinear")])
def test_holds_the_scaled_images(catalog, home, short_side, interpolation):
    done = []
    cache = PixelCache.build(
        catalog,
        short_side,
        home,
        interpolation=interpolation,
        progress=lambda *step: done.append(step),
    )
    assert len(cache) == len(catalog) == 8
    assert done == [(i + 1, 8) for i in range(8)]
    assert cache.catalog == catalog
    for i in range(8):
        assert cache[i].shape[:2] == (cache.heights[i], cache.widths[i])
        assert min(cache[i].shape[:2]) == short_side
        assert (cache[i] == reference(catalog.file(i), short_side, interpolation)).all()


def test_views_cannot_be_written(catalog, home):
    cache = PixelCache.build(catalog, 16, home)
    with pytest.raises(ValueError, match="read-only"):
        cache[0][0, 0, 0] = 1
    assert np.shares_memory(cache[0], cache[0])


def test_second_time_nothing_is_decoded(catalog, home, monkeypatch):
    first = PixelCache.build(catalog, 16, home)
    monkeypatch.setattr("proximetry.data.decoding.open_image", lambda *a: pytest.fail("decoded"))
    monkeypatch.setattr("proximetry.data.cache.open_bytes", lambda *a: pytest.fail("read"))
    second = PixelCache.build(catalog, 16, home)
    assert (second.flat == first.flat).all()


def test_found_by_content_not_by_place(catalog, home, tmp_path, monkeypatch):
    PixelCache.build(catalog, 16, home)
    shutil.copytree(catalog.root, tmp_path / "moved")
    monkeypatch.setattr("proximetry.data.decoding.open_image", lambda *a: pytest.fail("decoded"))
    PixelCache.build(Catalog.from_folder(tmp_path / "moved"), 16, home)
    assert len(stores(home)) == 1


def test_changed_file_size_or_filter_is_another_cache(catalog, home):
    before = PixelCache.build(catalog, 16, home)
    Image.new("RGB", (20, 20), "red").save(catalog.file(0))
    after = PixelCache.build(catalog, 16, home)
    assert tuple(after[0][0, 0]) == (255, 0, 0)
    assert (before[1] == after[1]).all()
    PixelCache.build(catalog, 17, home)
    PixelCache.build(catalog, 17, home, interpolation="bilinear")
    assert len(stores(home)) == 4


def break_two(catalog):
    first, second = Path(catalog.file(1)), Path(catalog.file(4))
    first.write_bytes(first.read_bytes()[: first.stat().st_size // 2])
    second.write_text("no image")


def test_bad_images_are_all_named(catalog, home):
    break_two(catalog)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(ImageError, match=r"2 of 8 images cannot be read") as caught:
            PixelCache.build(catalog, 16, home)
        assert f"{catalog.paths[1]}: damaged or truncated" in str(caught.value)
        assert f"{catalog.paths[4]}: not an image" in str(caught.value)
        assert str(caught.value).endswith("; --data.bad-images skip leaves them out")


def test_bad_images_can_be_skipped_and_are_reported(catalog, home):
    break_two(catalog)
    for _ in range(2):
        cache = PixelCache.build(catalog, 16, home, policy="skip")
        assert [path for path, _ in cache.bad] == [catalog.paths[1], catalog.paths[4]]
        assert cache.catalog.paths == tuple(catalog.paths[i] for i in (0, 2, 3, 5, 6, 7))
        for i in range(6):
            assert (cache[i] == reference(cache.catalog.file(i), 16)).all()


def failing(monkeypatch, place, names, error):
    """Let the files of these names not be opened by a part of the cache."""
    real = open_bytes

    def fail(path):
        if Path(path).name in names:
            raise ImageError(path, f"cannot be opened: {error.strerror}", passing=True) from error
        return real(path)

    monkeypatch.setattr(f"proximetry.data.{place}.open_bytes", fail)


@pytest.mark.parametrize("known", [True, False], ids=["digests known", "digests unknown"])
@pytest.mark.parametrize("place", ["pixel_cache", "images"], ids=["digesting", "decoding"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_passing_failure_is_not_remembered(catalog, home, monkeypatch, number, place, known):
    if known:  # by a cache of another size
        PixelCache.build(catalog, 20, home)
    error = OSError(number, os.strerror(number))
    with monkeypatch.context() as patch:
        failing(patch, place, {"2.png", "5.png"}, error)
        message = rf"2 of 8 images .*2\.png: cannot be opened: {error.strerror}, .*skip leaves"
        if not (known and place == "pixel_cache"):  # bytes that are digested are not read again
            with pytest.raises(ImageError, match=message):
                PixelCache.build(catalog, 16, home)
            for _ in range(2):  # the second time from the cache
                cache = PixelCache.build(catalog, 16, home, policy="skip")
                assert [path for path, _ in cache.bad] == ["class0/2.png", "class1/5.png"]
                assert len(cache) == 6
                for i in range(6):
                    assert (cache[i] == reference(cache.catalog.file(i), 16)).all()
    cache = PixelCache.build(catalog, 16, home)
    assert len(cache) == 8
    assert not cache.bad


def test_a_file_without_permission_is_left_out_until_it_has_it(ordinary_user):
    catalog = make_images(ordinary_user / "images")
    home = ordinary_user / "cache"
    PixelCache.build(catalog, 20, home)
    for closed in (Path(catalog.file(2)), Path(catalog.file(2)).parent):
        mode = closed.stat().st_mode
        closed.chmod(0)
        with pytest.raises(ImageError, match="cannot be opened: Permission denied"):
            PixelCache.build(catalog, 16, home)
        assert len(PixelCache.build(catalog, 16, home, policy="skip")) in (4, 7)
        closed.chmod(mode)
        assert len(PixelCache.build(catalog, 16, home)) == 8


def test_a_cache_folder_that_can_only_be_read(ordinary_user):
    whole, closed = (make_images(ordinary_user / name) for name in ("whole", "closed"))
    home = ordinary_user / "cache"
    Path(closed.file(2)).chmod(0)  # so that digests are not remembered
    for _ in range(2):
        assert len(PixelCache.build(whole, 16, home)) == 8
        assert len(PixelCache.build(closed, 16, home, policy="skip")) == 7
        for folder in (*home.glob("*/"), home):
            folder.chmod(0o555)
        for lock in home.glob("*.lock"):
            lock.chmod(0o444)


def test_special_files_are_named_and_not_opened(catalog, home):
    os.mkfifo(catalog.root / "class0" / "pipe.png")
    (catalog.root / "class1" / "zero.png").symlink_to("/dev/zero")
    (catalog.root / "class1" / "loop.png").symlink_to("loop.png")
    more = Catalog.from_folder(catalog.root)
    assert estimate(more, 16, home)[1] > 0
    cache = PixelCache.build(more, 16, home, policy="skip")
    assert dict(cache.bad) == {
        "class0/pipe.png": "cannot be opened: a named pipe, not a file",
        "class1/loop.png": "cannot be opened: Too many levels of symbolic links",
        "class1/zero.png": "cannot be opened: a device, not a file",
    }
    assert len(cache) == 8


@pytest.mark.parametrize("how", ["in place", "another file"])
def test_other_contents_of_the_same_size_and_time_are_noticed(catalog, home, how):
    first, second = (Path(catalog.file(i)) for i in (0, 1))
    Image.new("RGB", (20, 20), "red").save(first, "BMP")
    Image.new("RGB", (20, 20), "blue").save(second, "BMP")
    for _ in range(3):
        before = [file.stat() for file in (first, second)]
        assert tuple(PixelCache.build(catalog, 16, home)[0][0, 0]) == open_image(first).getpixel(
            (0, 0)
        )
        assert not estimate(catalog, 17, home)[0]
        data, other = first.read_bytes(), second.read_bytes()
        if how == "in place":
            first.write_bytes(other)
        else:
            (catalog.root / "new").write_bytes(other)
            (catalog.root / "new").rename(first)
        second.write_bytes(data)
        for file, was in zip((first, second), before, strict=True):
            os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
            assert file.stat().st_size == was.st_size
            assert file.stat().st_mtime_ns == was.st_mtime_ns


def test_a_change_while_decoding_is_not_filed_under_the_old_contents(catalog, home):
    def change(done, total):
        if done == total:
            Image.new("RGB", (20, 20), "red").save(catalog.file(3))

    with pytest.raises(ImageError, match=r"1 images changed while .* decoded: class0/6\.png; try"):
        PixelCache.build(catalog, 16, home, progress=change)
    assert stores(home) == []
    assert (PixelCache.build(catalog, 16, home)[3] == reference(catalog.file(3), 16)).all()


def test_copies_are_told(catalog, home):
    assert PixelCache.build(catalog, 16, home).catalog.notes == ()
    for copy in ("class0/copy.png", "class1/copy.png", "class1/more.png"):
        shutil.copy(catalog.file(0), catalog.root / copy)
    more = Catalog.from_folder(catalog.root)
    for _ in range(2):  # the second time without reading them
        assert PixelCache.build(more, 16, home).catalog.notes == (
            "1 image is a copy, byte for byte: class0/copy.png (of class0/0.png)",
            "2 images are copies of others in another class, byte for byte, so one of the two "
            "labels is wrong: class1/copy.png (of class0/0.png), class1/more.png (of "
            "class0/0.png)",
        )


def test_names_that_are_not_utf8(tmp_path, home):
    catalog = make_images(tmp_path / "images")
    (catalog.root / "class0").rename(os.fsdecode(os.fsencode(catalog.root) + b"/cl\xe4ss"))
    Path(catalog.file(4)).rename(os.fsdecode(os.fsencode(catalog.root) + b"/class1/\xff.png"))
    (catalog.root / "class1" / os.fsdecode(b"\xfe.png")).write_text("no image")
    for _ in range(2):
        cache = PixelCache.build(Catalog.from_folder(catalog.root), 16, home, policy="skip")
        assert len(cache) == 8
        assert [path for path, _ in cache.bad] == ["class1/\udcfe.png"]


def test_a_file_that_comes_back_is_used(catalog, home):
    file = Path(catalog.file(2))
    data = file.read_bytes()
    file.unlink()
    cache = PixelCache.build(catalog, 16, home, policy="skip")
    assert cache.bad == ((catalog.paths[2], "no such file"),)
    file.write_bytes(data)
    assert len(PixelCache.build(catalog, 16, home)) == 8


def test_nothing_readable_is_an_error_even_when_skipping(tmp_path, home):
    (tmp_path / "x.png").write_text("no")
    catalog = Catalog(("x.png",), ("a",), ("all",), tmp_path)
    with pytest.raises(ImageError, match="1 of 1 images cannot be read"):
        PixelCache.build(catalog, 16, home, policy="skip")


def test_extreme_shapes_are_refused(tmp_path, home):
    Image.new("RGB", (1, 5000)).save(tmp_path / "line.png")
    catalog = Catalog(("line.png",), ("a",), ("all",), tmp_path)
    with pytest.raises(ImageError, match="too narrow to scale"):
        PixelCache.build(catalog, 256, home)


@pytest.mark.parametrize("damage", ["flip", "cut", "index", "header", "gone"])
def test_damage_is_noticed_and_repaired(catalog, home, damage):
    good = PixelCache.build(catalog, 16, home).flat.clone()
    (folder,) = stores(home)
    before = files(folder)
    file = folder / {"index": "index.npy", "header": "header.json"}.get(damage, "pixels.bin")
    data = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "gone":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    assert (PixelCache.build(catalog, 16, home).flat == good).all()
    assert stores(home) == [folder]
    assert files(folder) == before


@pytest.mark.parametrize("count", [8, 1500])
def test_estimate_tells_the_bytes_from_headers_and_the_cache_that_is_there(tmp_path, home, count):
    catalog = make_images(tmp_path / "images", 8)
    for i in range(8, count):  # more than are looked at
        (tmp_path / "images" / "class0" / f"{i}.png").hardlink_to(catalog.file(i % 8))
    catalog = Catalog.from_folder(tmp_path / "images")
    exists, guess = estimate(catalog, 16, home)
    assert not exists
    assert not home.exists()
    cache = PixelCache.build(catalog, 16, home)
    assert guess == pytest.approx(cache.flat.nbytes, rel=0 if count == 8 else 0.02)
    assert estimate(catalog, 16, home) == (True, cache.flat.nbytes)
    assert not estimate(catalog, 17, home)[0]
    assert not estimate(catalog, 16, home, interpolation="bilinear")[0]


def test_estimate_leaves_out_what_is_no_image(catalog, home):
    Path(catalog.file(4)).write_text("no image")
    Image.new("RGB", (1, 300_000)).save(catalog.file(5))  # too narrow to scale
    exists, guess = estimate(catalog, 16, home)
    assert not exists
    assert guess == PixelCache.build(catalog, 16, home, policy="skip").flat.nbytes
    with pytest.raises(ValueError, match="empty"):
        estimate(catalog.subset([]), 16, home)


# Tells what it does, and stops after its first image until a file is there.
AT_ONCE = """
import os, sys, time
from pathlib import Path
from proximetry.data import Catalog, PixelCache, decoding
from proximetry.data import cache

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def telling(what, function):
    def tell_first(file, **options):
        tell(what, Path(file).name)
        return function(file, **options)
    return tell_first

def hold(done, total):
    if done == 1:
        tell("held")
        while not Path(sys.argv[3]).exists():
            time.sleep(0.01)

cache.open_bytes = telling("read", cache.open_bytes)
decoding.open_image = telling("decoded", decoding.open_image)
cache = PixelCache.build(
    Catalog.from_folder(sys.argv[1]), 24, sys.argv[2],
    progress=hold, starting=lambda: tell("starting"), waiting=lambda: tell("waiting"),
)
tell("sum", int(cache.flat.long().sum()))
"""


@pytest.fixture
def three(server, tmp_path, home):
    """Processes that want the same cache, when one decodes and the others wait; and a gate."""
    make_images(tmp_path / "images", 40)
    gate = tmp_path / "open"
    words = AT_ONCE, tmp_path / "images", home, gate
    logs = [tmp_path / f"{i}.log" for i in range(3)]
    for log in logs:
        log.touch()
    processes = [Process(server, log, *words) for log in logs]
    try:
        yield until_one_decodes(processes), gate
    finally:
        for process in processes:
            process.kill()


def until_one_decodes(processes):
    """Wait until one is held after its first image and the others wait; return it first."""

    def held():
        return [process for process in processes if "held" in process.said()]

    def at_rest():
        return all(re.search("held|waiting", process.said()) for process in processes)

    processes[0].until(lambda: held() and at_rest())
    (first,) = held()
    return [first, *(process for process in processes if process is not first)]


def told(process, what):
    lines = [line.split() for line in process.said().splitlines()]
    return sorted(words[1] for words in lines if words[0] == what and len(words) > 1)


def assert_same_store(processes, tmp_path, home):
    """Each has the pixels of a cache that is built alone, and that is all there is."""
    alone = PixelCache.build(Catalog.from_folder(tmp_path / "images"), 24, tmp_path / "alone")
    for process in processes:
        assert told(process, "sum") == [str(int(alone.flat.long().sum()))]
    assert [*map(files, stores(home))] == [*map(files, stores(tmp_path / "alone"))]


def test_of_processes_that_start_together_one_decodes(three, tmp_path, home):
    (first, *others), gate = three
    gate.touch()
    assert [process.ended() for process in (first, *others)] == [0, 0, 0]
    names = sorted(f"{i}.png" for i in range(40))
    assert told(first, "read") == told(first, "decoded") == names
    assert "waiting" not in first.said()
    for other in others:
        assert [line.split()[0] for line in other.said().splitlines()] == ["waiting", "sum"]
    assert_same_store((first, *others), tmp_path, home)


def test_a_killed_builder_is_not_waited_for(three, tmp_path, home):
    (first, *others), gate = three
    first.send(signal.SIGKILL)
    assert first.ended() == -signal.SIGKILL
    second, third = until_one_decodes(others)
    gate.touch()
    assert [second.ended(), third.ended()] == [0, 0]
    said = [line.split()[0] for line in second.said().splitlines()]
    assert [word for word in said if word != "decoded"] == ["waiting", "starting", "held", "sum"]
    assert told(second, "decoded") == sorted(f"{i}.png" for i in range(40))
    assert third.said().splitlines()[0] == "waiting"
    assert not told(third, "read") + told(third, "decoded")
    assert_same_store((second, third), tmp_path, home)


SLOW_BUILD = """
import sys, time
from proximetry.data import Catalog, PixelCache
PixelCache.build(
    Catalog.from_folder(sys.argv[1]), 16, sys.argv[2],
    progress=lambda done, total: (print(done, flush=True), time.sleep(0.05)),
)
"""


def test_killed_while_building_starts_clean(catalog, home):
    builder = subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD, str(catalog.root), str(home)], stdout=subprocess.PIPE
    )
    assert builder.stdout.readline().strip() == b"1"
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    builder.stdout.close()
    assert [p.name for p in stores(home)]  # the part it was writing
    cache = PixelCache.build(catalog, 16, home)
    for i in range(8):
        assert (cache[i] == reference(catalog.file(i), 16)).all()
    assert [p.name.startswith(".") for p in stores(home)] == [False]


def test_failure_while_writing_leaves_nothing(catalog, home, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("proximetry.data.cache.np.save", fail)
    with pytest.raises(OSError, match="No space"):
        PixelCache.build(catalog, 16, home)
    assert stores(home) == []


def test_pickles_without_its_pixels(catalog, home):
    cache = PixelCache.build(catalog, 16, home)
    data = pickle.dumps(cache)
    assert len(data) < 5000 < cache.flat.nbytes
    again = pickle.loads(data)
    assert again.catalog == catalog
    assert (again[5] == cache[5]).all()


def test_in_memory():
    images = [np.full((2, 3, 3), 7, np.uint8), np.full((4, 1, 3), 9, np.uint8)]
    cache = PixelCache.in_memory(images)
    assert [cache[i].tolist() for i in range(2)] == [i.tolist() for i in images]
    assert len(PixelCache.in_memory([])) == 0
    assert (pickle.loads(pickle.dumps(cache))[1] == 9).all()
    moved = cache.to("cpu")
    assert (moved[0] == cache[0]).all()
    with pytest.raises(ValueError, match="image 0 must be uint8 of H×W×3, got float64"):
        PixelCache.in_memory([np.zeros((2, 2, 3))])
    with pytest.raises(ValueError, match="2 rows in the catalogue, 1 images"):
        PixelCache(Catalog(("a", "b"), ("a", "b"), ("all",) * 2), cache.flat, np.zeros((1, 3), int))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "ignore"}, "got 'ignore'"),
        ({"size": 0}, "1 to 4096 pixels, got short side 0"),
        ({"size": (16, 4097)}, "1 to 4096 pixels, got 16 × 4097"),
        ({"interpolation": "nearest"}, "'bilinear' or 'bicubic', got 'nearest'"),
    ],
)
def test_bad_options(catalog, home, options, message):
    with pytest.raises(ValueError, match=message):
        PixelCache.build(catalog, **({"size": 16, "root": home} | options))
    with pytest.raises(ValueError, match="empty"):
        PixelCache.build(catalog.subset([]), 16, home)


def test_default_place(catalog, tmp_path, monkeypatch):
    monkeypatch.setenv("PROXIMETRY_CACHE", str(tmp_path / "own"))
    PixelCache.build(catalog, 16)
    assert stores(tmp_path / "own" / "pixels")
    monkeypatch.delenv("PROXIMETRY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    PixelCache.build(catalog, 16)
    assert stores(tmp_path / "xdg" / "proximetry" / "pixels")


def test_without_locks_the_first_to_finish_wins(catalog, home, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    first = PixelCache.build(catalog, 16, home)
    # Somebody else finishes the same cache while this process is decoding.
    (folder,) = stores(home)
    kept = folder.rename(home / "kept")
    other_part = home / f".{folder.name}.other.part"
    other_part.mkdir()

    def other(*_):
        if not folder.exists():
            shutil.copytree(kept, folder)

    again = PixelCache.build(catalog, 16, home, progress=other)
    assert (again.flat == first.flat).all()
    # Without a lock nobody can tell that the other one is not at work any more.
    assert other_part.exists()


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP])
def test_file_systems_that_know_no_locks_at_all(catalog, home, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, "unknown here")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert len(PixelCache.build(catalog, 16, home)) == 8
