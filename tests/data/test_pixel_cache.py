import errno
import json
import os
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image

from proximetry.data import Catalog, ImageError, PixelCache, open_image
from proximetry.data.pixel_cache import estimate, is_intact, unreadable_images
from tests.interrupt import completes, kill_at
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
    return [p for p in home.iterdir() if p.is_dir()]


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def reference(file, short_side, interpolation="bicubic"):
    image = open_image(file)
    scale = short_side / min(image.size)
    size = tuple(max(short_side, int(s * scale + 1e-9)) for s in image.size)
    return np.asarray(image.resize(size, Image.Resampling[interpolation.upper()]))


@pytest.mark.parametrize(("short_side", "interpolation"), [(16, "bicubic"), (31, "bilinear")])
def test_cache_contains_the_scaled_images(catalog, home, short_side, interpolation):
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
    with pytest.raises(ValueError, match="read-only"):
        cache[0][0, 0, 0] = 1
    assert np.shares_memory(cache[0], cache[0])


def test_cached_images_are_not_decoded_again(catalog, home, monkeypatch):
    first = PixelCache.build(catalog, 16, home)
    monkeypatch.setattr("proximetry.data.loader.open_image", lambda *a: pytest.fail("decoded"))
    (folder,) = stores(home)
    os.utime(folder / "header.json", (0, 0))
    second = PixelCache.build(catalog, 16, home)
    assert (second.flat == first.flat).all()
    assert time.time() - (folder / "header.json").stat().st_mtime < 60  # the time of last use


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


def test_bad_images_are_named_or_skipped(catalog, home):
    break_two(catalog)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(ImageError, match=r"2 of 8 images cannot be read") as caught:
            PixelCache.build(catalog, 16, home)
        assert f"{catalog.paths[1]}: damaged or truncated" in str(caught.value)
        assert f"{catalog.paths[4]}: not an image" in str(caught.value)
        with pytest.raises(ImageError, match="2 of 2 images"):  # none is readable
            PixelCache.build(catalog.subset([1, 4]), 16, home, policy="skip")
        cache = PixelCache.build(catalog, 16, home, policy="skip")
        assert [path for path, _ in cache.bad] == [catalog.paths[1], catalog.paths[4]]
        assert cache.catalog.paths == tuple(catalog.paths[i] for i in (0, 2, 3, 5, 6, 7))
        for i in range(6):
            assert (cache[i] == reference(cache.catalog.file(i), 16)).all()


def test_file_without_permission_is_retried(ordinary_user):
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


def test_change_while_decoding_is_an_error(catalog, home):
    def change(done, total):
        if done == total:
            Image.new("RGB", (20, 20), "red").save(catalog.file(3))

    with pytest.raises(ImageError, match="changed while they were decoded"):
        PixelCache.build(catalog, 16, home, progress=change)
    assert stores(home) == []
    assert (PixelCache.build(catalog, 16, home)[3] == reference(catalog.file(3), 16)).all()


def test_duplicates_are_reported(catalog, home):
    assert PixelCache.build(catalog, 16, home).catalog.notes == ()
    for copy in ("class0/copy.png", "class1/copy.png", "class1/more.png"):
        shutil.copy(catalog.file(0), catalog.root / copy)
    more = Catalog.from_folder(catalog.root)
    for _ in range(2):  # the second time without reading them
        assert PixelCache.build(more, 16, home).catalog.notes == (
            "duplicate images in the same class (1): class0/copy.png (of class0/0.png)",
            "duplicate images in different classes, so one of the two labels is wrong (2): "
            "class1/copy.png (of class0/0.png), class1/more.png (of class0/0.png)",
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


@pytest.mark.parametrize("damage", ["cut", "header", "gone"])
def test_truncated_cache_is_rebuilt(catalog, home, damage):
    good = PixelCache.build(catalog, 16, home).flat.clone()
    (folder,) = stores(home)
    file = folder / ("header.json" if damage == "header" else "pixels.bin")
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    assert (PixelCache.build(catalog, 16, home).flat == good).all()
    assert stores(home) == [folder]
    assert is_intact(folder)


@pytest.mark.parametrize("name", ["pixels.bin", "index.npy"])
def test_flipped_bit_is_detected_by_is_intact(catalog, home, name):
    PixelCache.build(catalog, 16, home)
    (folder,) = stores(home)
    data = bytearray((folder / name).read_bytes())
    data[-9] ^= 1
    (folder / name).write_bytes(data)
    assert not is_intact(folder)


def test_least_recently_used_caches_are_removed(catalog, home, monkeypatch):
    for days, side in enumerate((16, 17, 18)):
        size = PixelCache.build(catalog, side, home).flat.nbytes
        for folder in stores(home):
            used = folder.joinpath("header.json").stat().st_mtime - days * 86_400
            for file in folder.iterdir():
                os.utime(file, (used, used))
    PixelCache.build(catalog, 16, home)  # used again
    monkeypatch.setattr("proximetry.data.pixel_cache.MAX_CACHE_BYTES", 4 * size)
    new = PixelCache.build(catalog, 19, home)
    remaining = {side for side in (16, 17, 18, 19) if estimate(catalog, side, home)[0]}
    assert remaining == {16, 18, 19}
    monkeypatch.setattr("proximetry.data.pixel_cache.MAX_CACHE_BYTES", 1)
    largest = PixelCache.build(catalog, 20, home)  # larger than the limit, and in use
    assert len(stores(home)) == 1
    assert new.flat.sum() > 0  # a removed file stays mapped
    assert len(largest) == 8


@pytest.mark.parametrize("count", [8, 1500])
def test_estimate_reads_headers_or_the_existing_cache(tmp_path, home, count):
    catalog = make_images(tmp_path / "images", 8)
    for i in range(8, count):  # more than are sampled
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


def test_estimate_skips_unreadable_images(catalog, home):
    Path(catalog.file(4)).write_text("no image")
    Image.new("RGB", (1, 300_000)).save(catalog.file(5))  # too narrow to scale
    assert estimate(catalog, 16, home) == (
        False,
        PixelCache.build(catalog, 16, home, policy="skip").flat.nbytes,
    )
    with pytest.raises(ValueError, match="empty"):
        estimate(catalog.subset([]), 16, home)


# Logs its actions, and waits after its first image until a file exists.
BUILD_CACHE = """
import os, sys, time
from pathlib import Path
from proximetry.data import Catalog, PixelCache, loader

def log(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

open_image = loader.open_image
def logged(file, **options):
    log("decoded", Path(file).name)
    return open_image(file, **options)

def pause(done, total):
    if done == 1:
        log("paused")
        while not Path(sys.argv[3]).exists():
            time.sleep(0.01)

loader.open_image = logged
cache = PixelCache.build(
    Catalog.from_folder(sys.argv[1]), 24, sys.argv[2],
    progress=pause, on_start=lambda: log("starting"), on_wait=lambda: log("waiting"),
)
log("sum", int(cache.flat.long().sum()))
"""


@pytest.fixture
def three(server, tmp_path, home):
    """Processes that open the same cache: one decodes, the others wait."""
    make_images(tmp_path / "images", 40)
    gate = tmp_path / "open"
    words = BUILD_CACHE, tmp_path / "images", home, gate
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
    """Wait until one is paused after its first image and the others wait; return it first."""

    def paused():
        return [process for process in processes if "paused" in process.output()]

    def at_rest():
        return all(re.search("paused|waiting", process.output()) for process in processes)

    processes[0].until(lambda: paused() and at_rest())
    (first,) = paused()
    return [first, *(process for process in processes if process is not first)]


def logged(process, what):
    lines = [line.split() for line in process.output().splitlines()]
    return sorted(words[1] for words in lines if words[0] == what and len(words) > 1)


def assert_same_pixels(processes, tmp_path, home):
    alone = PixelCache.build(Catalog.from_folder(tmp_path / "images"), 24, tmp_path / "alone")
    for process in processes:
        assert logged(process, "sum") == [str(int(alone.flat.long().sum()))]
    (store,), (expected,) = stores(home), stores(tmp_path / "alone")
    assert files(store) == files(expected)


def test_one_of_several_processes_decodes(three, tmp_path, home):
    (first, *others), gate = three
    gate.touch()
    assert [process.ended() for process in (first, *others)] == [0, 0, 0]
    assert logged(first, "decoded") == sorted(f"{i}.png" for i in range(40))
    assert "waiting" not in first.output()
    for other in others:
        assert [line.split()[0] for line in other.output().splitlines()] == ["waiting", "sum"]
    assert_same_pixels((first, *others), tmp_path, home)


def test_killed_builder_is_replaced(three, tmp_path, home):
    (first, *others), gate = three
    first.send(signal.SIGKILL)
    assert first.ended() == -signal.SIGKILL
    second, third = until_one_decodes(others)
    gate.touch()
    assert [second.ended(), third.ended()] == [0, 0]
    assert logged(second, "decoded") == sorted(f"{i}.png" for i in range(40))
    assert not logged(third, "decoded")
    assert_same_pixels((second, third), tmp_path, home)


def test_killed_while_building_starts_clean(catalog, home):
    """Killed at every change of a file."""
    event = 0
    while True:
        event += 1

        def work(event=event):
            kill_at(event, home)
            PixelCache.build(catalog, 16, home)

        done = completes(work)
        cache = PixelCache.build(catalog, 16, home)
        assert (cache[3] == reference(catalog.file(3), 16)).all()
        assert [folder.name.startswith(".") for folder in stores(home)] == [False]
        assert is_intact(stores(home)[0])
        if done:
            break
        shutil.rmtree(home)
    assert event > 4


def test_in_memory():
    images = [np.full((2, 3, 3), 7, np.uint8), np.full((4, 1, 3), 9, np.uint8)]
    cache = PixelCache.in_memory(images)
    assert [cache[i].tolist() for i in range(2)] == [i.tolist() for i in images]
    assert len(PixelCache.in_memory([])) == 0
    moved = cache.to("cpu")
    assert (moved[0] == cache[0]).all()
    with pytest.raises(ValueError, match="image 0 must be uint8 of H×W×3, got float64"):
        PixelCache.in_memory([np.zeros((2, 2, 3))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "ignore"}, "got 'ignore'"),
        ({"size": 0}, "1 to 4096 pixels, got short side 0"),
        ({"size": (16, 4097)}, "1 to 4096 pixels, got 16 × 4097"),
        ({"interpolation": "nearest"}, "'bilinear' or 'bicubic', got 'nearest'"),
    ],
)
def test_invalid_options_write_nothing(catalog, home, options, message):
    with pytest.raises(ValueError, match=message):
        PixelCache.build(catalog, **({"size": 16, "root": home} | options))
    with pytest.raises(ValueError, match="empty"):
        PixelCache.build(catalog.subset([]), 16, home)
    assert not home.exists()


def test_default_folder_follows_xdg(catalog, tmp_path, monkeypatch):
    monkeypatch.delenv("PROXIMETRY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    PixelCache.build(catalog, 16)
    assert stores(tmp_path / "xdg" / "proximetry" / "pixels")


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_file_system_without_locks(catalog, home, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr("fcntl.flock", fail)
    assert len(PixelCache.build(catalog, 16, home)) == 8


def test_unreadable_images_are_cached_until_a_file_changes(catalog, home, monkeypatch):
    break_two(catalog)
    with pytest.raises(ImageError, match=r"1 of 8 images .*no image|4\.png|not an image"):
        unreadable_images(catalog, 16, "bicubic", "error", home)  # headers
    bad = unreadable_images(catalog, 16, "bicubic", "skip", home)
    assert [path for path, _ in bad] == [catalog.paths[1], catalog.paths[4]]
    with monkeypatch.context() as patch:
        patch.setattr("proximetry.data.loader.open_image", lambda *a: pytest.fail("decoded"))
        assert unreadable_images(catalog, 16, "bicubic", "skip", home) == bad
    Image.new("RGB", (20, 20)).save(catalog.file(1))
    assert len(unreadable_images(catalog, 16, "bicubic", "skip", home)) == 1


class TestCommands:
    """The commands `proximetry cache` list, clean and verify."""

    @pytest.fixture
    def call(self, call, tmp_path, monkeypatch):
        """Call a command, with two caches of one set of images and one of another."""
        monkeypatch.setenv("PROXIMETRY_CACHE", str(tmp_path / "cache"))
        for name, sides in (("first", (16, 20)), ("second", (16,))):
            make_images(tmp_path / name, 4, seed=len(name))
            for side in sides:
                PixelCache.build(Catalog.from_folder(tmp_path / name), side)
        return partial(call, "cache")

    def listed(self, call):
        return {one["name"]: one for one in json.loads(call("list", "--json"))["caches"]}

    def test_list_names_images_and_settings(self, call, tmp_path):
        caches = self.listed(call)
        about = sorted((one["data"][0], one["images"], one["about"]) for one in caches.values())
        first, second = str(tmp_path / "first"), str(tmp_path / "second")
        assert about == [
            (first, 4, "short side 16, bicubic"),
            (first, 4, "short side 20, bicubic"),
            (second, 4, "short side 16, bicubic"),
        ]
        for one in caches.values():
            folder = tmp_path / "cache" / one["name"]
            assert one["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
        text = call("list")
        assert f"{tmp_path / 'cache'}: 3 caches" in text
        assert f"{second}; 4 images; short side 16, bicubic" in text

    def test_clean_by_name_age_and_size(self, call, tmp_path):
        names = sorted(self.listed(call))
        for days, name in enumerate(names):
            used = time.time() - 86_400 * (10 * days + 1)
            for file in (tmp_path / "cache" / name).iterdir():
                os.utime(file, (used, used))
        text = call("clean", "--unused-for", "2w", "--dry-run")
        assert f"would remove pixels/{names[2][7:19]}" in text
        assert sorted(self.listed(call)) == names
        done = json.loads(call("clean", "--unused-for", "2w", "--json"))
        assert [one["name"] for one in done["removed"]] == [names[2]]
        rest = json.loads(call("list", "--json"))["bytes"]
        text = call("clean", "--keep", f"{(rest - 1) / 1000:.3f}kB")
        assert f"removed pixels/{names[1][7:19]}" in text  # the least recently used
        assert sorted(self.listed(call)) == names[:1]
        assert call("clean", names[0][7:15]).startswith(f"removed pixels/{names[0][7:19]}")
        assert not self.listed(call)
        assert not list((tmp_path / "cache" / "pixels").glob(".*"))

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "no caches selected"),
            (["nothing"], "nothing matches 0 caches. Pass a name"),
            (["pixels/"], "pixels/ matches 3 caches"),
            (["--unused-for", "30"], "'30'"),
            (["--keep", "lots"], "'lots'"),
        ],
    )
    def test_usage_errors_remove_nothing(self, call, words, message, tmp_path):
        before = sorted(tmp_path.rglob("*"))
        assert message in call("clean", *words, code=2)
        assert sorted(tmp_path.rglob("*")) == before

    def test_clean_keeps_caches_that_are_written(self, call, tmp_path):
        name = next(iter(self.listed(call)))
        with FileLock(tmp_path / "cache" / f"{name}.lock"):
            for more in (["--dry-run"], []):
                text = call("clean", name, *more)
                assert "is in use" in text
                assert "nothing to remove" in text
        assert name in self.listed(call)
        assert "removed" in call("clean", name)

    def test_clean_removes_interrupted_caches(self, call, tmp_path):
        folder = tmp_path / "cache" / "pixels"
        old, new = (folder / f".key.{32 * c}.part" for c in "ab")
        for part in (old, new):
            part.mkdir()
            (part / "pixels.bin").write_bytes(bytes(1000))
        os.utime(old / "pixels.bin", (0, 0))
        assert "1 kB of interrupted caches" in call("list")
        call("clean", "--keep", "1TB")
        assert not old.exists()
        assert new.exists()
        assert len(self.listed(call)) == 3

    def test_verify_removes_damaged_caches(self, call, tmp_path):
        name = next(iter(self.listed(call)))
        file = tmp_path / "cache" / name / "pixels.bin"
        data = bytearray(file.read_bytes())
        data[10] ^= 1
        file.write_bytes(data)
        assert json.loads(call("verify", "--json"))["damaged"][0]["name"] == name
        assert name not in self.listed(call)
        assert call("verify").strip() == "2 caches, 0 damaged"
