"""The public interface of a gallery: build, search, change, errors."""

import dataclasses
import errno
import json
import os
import shutil
import stat
import tarfile
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from proximetry._util.errors import UsageError
from proximetry._util.files import CHECKSUM, json_with_checksum
from proximetry.data import Catalog, open_image
from proximetry.data.vectors import VectorCatalog
from proximetry.metrics import expand_queries, k_reciprocal_distances, retrieve
from proximetry.metrics._search.similarities import normalize
from proximetry.models import Embedder
from proximetry.search import Gallery, changes, duplicates, indexes, manifest, metadata, snapshot
from proximetry.search.manifest import DamagedGalleryError
from tests.search.conftest import DIM, make_embedder, make_table, make_vectors, names


def test_search_equals_retrieve(embedder, images, tmp_path):
    catalog = Catalog.from_folder(images)
    lines = []
    built = Gallery.build(embedder, catalog, tmp_path / "gallery", report=lines.append)
    assert lines == ["index: auto → Flat for 48 images: every search is exact"]
    vectors = embedder.encode([catalog.file(row) for row in range(len(catalog))])
    for results in (built, Gallery.open(tmp_path / "gallery")):
        queries, steps = [catalog.file(3), Image.open(catalog.file(40))], []
        result = results.search(queries, 5, progress=lambda *step: steps.append(step))  # noqa: B023
        assert steps[-1] == (2, 2)
        expected = retrieve(vectors, queries=vectors[[3, 40]], k=5)
        assert np.array_equal(result.ids, expected.ids)
        np.testing.assert_allclose(result.similarities, expected.similarities, atol=3e-7)
        assert result.paths[0].tolist() == [catalog.file(i) for i in result.ids[0]]
        assert result.labels[1].tolist() == [catalog.labels[i] for i in result.ids[1]]
        assert result.column("split")[0, 0] == "all"
        assert np.array_equal(results.search(vectors[[3, 40]], 5).ids, result.ids)
    assert len(built) == len(catalog)
    assert "48 images, 8 dimensions, cosine, index Flat" in repr(built)


def test_one_image_or_vector_is_a_query(embedder, images, tmp_path):
    built = Gallery.build(embedder, images, tmp_path / "gallery")  # a folder of class folders
    assert built.count_labels() == {f"class{number:02d}": 4 for number in range(12)}
    file = images / "class03" / "1.png"
    expected = built.search([file], 5)
    for query in (file, open_image(file), np.asarray(open_image(file)), embedder.encode(file)):
        assert np.array_equal(built.search(query, 5).ids, expected.ids)
    assert built.contains(file) == [True]
    Image.new("RGB", (9, 9)).save(tmp_path / "new.png")
    assert len(built.add(tmp_path / "new.png", labels=["new"])) == 1


def test_show_returns_a_contact_sheet(embedder, images, tmp_path):
    built = Gallery.build(embedder, images, tmp_path / "gallery")
    file = images / "class03" / "1.png"
    sheets = [
        built.search(query, 4).show()
        for query in (file, open_image(file), torch.from_numpy(np.array(open_image(file))))
    ]
    boxes = [sheet.crop((10, 10, 170, 170)).tobytes() for sheet in sheets]  # of the query
    assert boxes[0] == boxes[1] == boxes[2]
    assert sheets[0].width > 5 * 160
    assert built.search(embedder.encode([file, file]), 4).show().height > 2 * 160


def test_predict_is_the_vote_of_the_nearest_images(gallery):
    labels = ["jay", "crow", "crow", "jay", None, None]
    vectors = np.eye(DIM, dtype=np.float32)[:6] + 0.1 * np.arange(6, dtype=np.float32)[:, None]
    paths = [f"/{number}.png" for number in range(6)]
    built = Gallery.build(
        gallery.embedder, paths, gallery.path / "../votes", labels=labels, vectors=vectors
    )
    result = built.search(vectors[0], 6)
    (predicted,) = built.predict(vectors[0], 6)
    assert predicted == result.predictions[0] == ("jay", 2, 4)  # at a tie the nearer one
    assert str(predicted) == "jay (2 of 4)"
    assert built.predict(vectors[4], 1) == [(None, 0, 0)]
    assert [one.label for one in built.predict(vectors[:2], 1)] == ["jay", "crow"]


@pytest.mark.parametrize("normalized", [True, False])
def test_flat_order_equals_float64_brute_force(tmp_path, normalized):
    embedder = make_embedder(normalize=normalized)
    vectors = make_vectors(5000)
    vectors[2000:2100] = vectors[:100]  # copies are ordered by id
    vectors[3000:4500] = vectors[7]  # more duplicates than any list has places
    gallery = Gallery.build(embedder, make_table(0, 5000), tmp_path / "g", vectors=vectors)
    queries = torch.from_numpy(np.concatenate([vectors[:9], make_vectors(40, seed=1)]))
    queries = (normalize(queries) if normalized else queries).numpy().astype(np.float64)
    stored = gallery.vectors(gallery.ids()).astype(np.float64)
    for query, ids in zip(queries, gallery.search(queries, 1000).ids, strict=True):
        scores = (stored * query).sum(1) if normalized else -((stored - query) ** 2).sum(1)
        assert ids.tolist() == np.lexsort((np.arange(5000), -scores))[:1000].tolist()


def test_labels_of_a_list_of_files(embedder, images, tmp_path):
    files = [str(path) for path in sorted(images.rglob("*.png"))[:6]]
    gallery = Gallery.build(embedder, files[:3], tmp_path / "g", labels=["a", "b", None])
    gallery.add(files[3:4], labels=["c"])
    assert gallery.rows(gallery.ids())["label"] == ["a", "b", None, "c"]
    with pytest.warns(UserWarning, match="1 new image without a class"):
        gallery.add(files[4:5])
    (unchanged,) = gallery.add(files[:1], replace=True)  # keeps its class
    (relabeled,) = gallery.add(files[1:2], labels=["d"], replace=True)
    assert gallery.rows([unchanged, relabeled])["label"] == ["a", "d"]
    table = metadata.from_columns({"path": files[4:], "label": ["a", None], "year": [1990, None]})
    gallery.add(table, replace=True)
    ids = gallery.add(files[4:], replace=True)
    assert gallery.rows(ids) == {"path": files[4:], "label": ["a", None], "year": [1990, None]}
    for wrong in (["x", "y"], "x"):
        with pytest.raises(UsageError, match="labels"):
            gallery.add(files[5:], labels=wrong)
    with pytest.raises(UsageError, match="labels"):
        gallery.add(Catalog.from_folder(images), labels=["x"])


def test_shard_members_reject_path_traversal(images, tmp_path):
    image = next(images.rglob("*.png"))
    members = ["ant/../../private/photo.png", "ant//0.png", "ant/./1.png"]
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for member in members:
            tar.add(image, member)
    result = metadata.from_images([f"{tmp_path}/sub/../shard.tar::{member}" for member in members])
    paths = metadata.values(result["path"])
    assert paths == [f"{tmp_path}/shard.tar::{member}" for member in members]
    for path in paths:
        open_image(path)


def test_symlink_parent_is_resolved(tmp_path):
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "near").symlink_to(tmp_path / "far" / "inner")
    result = metadata.from_images(
        [str(tmp_path / "near" / ".." / "1.png"), str(tmp_path / "near/2.png")]
    )
    assert metadata.values(result["path"]) == [f"{tmp_path}/far/1.png", f"{tmp_path}/near/2.png"]


def test_where_filters_exactly(gallery):
    vectors, queries = make_vectors(60), make_vectors(5, seed=1)
    for where, chosen in (
        ({"label": "class3"}, [i for i in range(60) if i % 5 == 3]),
        ({"label": ["class3", "class1"]}, [i for i in range(60) if i % 5 in (1, 3)]),
        ({"label": "class0", "path": names(0, 20)}, range(0, 20, 5)),
        ({"path": names(7, 1)}, [7]),
    ):
        expected = retrieve(vectors[list(chosen)], queries=queries, k=4)
        result = gallery.search(queries, 4, where=where)
        assert np.array_equal(result.ids[:, : expected.k], np.array(chosen)[expected.ids])
        assert (result.ids[:, expected.k :] == -1).all()
        assert gallery.ids(where).tolist() == list(chosen)


def test_numeric_columns_and_missing_values(embedder, tmp_path):
    table = metadata.from_columns({"path": names(0, 3), "year": [1990, 2001, 2001]})
    gallery = Gallery.build(embedder, table, tmp_path / "g", vectors=make_vectors(3))
    gallery.add(make_table(3, 2), vectors=make_vectors(2, seed=1))
    assert gallery.ids({"year": 2001}).tolist() == [1, 2]
    assert gallery.ids({"year": "1990"}).tolist() == [0]
    assert gallery.ids({"label": None}).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="int64, got 'then'"):
        gallery.ids({"year": "then"})
    gallery.compact()
    assert gallery.rows([4, 1]) == {
        "path": ["/images/00004.png", "/images/00001.png"],
        "year": [None, 2001],
        "label": ["class4", None],
    }


def test_column_type_may_widen(embedder, tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "MAX_MERGED_ROWS", 0)  # segments keep their column types

    def table(first, **columns):
        return metadata.from_columns({"path": names(first, 2), **columns})

    gallery = Gallery.build(
        embedder, table(0, size=[9, 10], hue=[None] * 2), tmp_path / "g", vectors=make_vectors(2)
    )
    more = table(2, size=[9.5, 9.0], hue=["red", None])
    gallery.add(more, vectors=make_vectors(2, seed=1))
    assert gallery.ids({"size": 9.5}).tolist() == [2]
    assert gallery.ids({"size": ["9", "9.5"]}).tolist() == [0, 2, 3]
    assert gallery.ids({"hue": "red"}).tolist() == [2]
    assert gallery.ids({"hue": None}).tolist() == [0, 1, 3]
    with pytest.raises(ValueError, match="double, got 'big'"):
        gallery.ids({"size": ["big", 9]})
    for wrong in ([2**60 + 1, 1], ["large", "small"]):
        with pytest.raises(UsageError, match="column types differ"):
            gallery.add(table(4, size=wrong), vectors=make_vectors(2))


def test_paths_that_are_not_utf8(embedder, images, tmp_path):
    odd = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(odd)
    file = os.fsdecode(odd + b"/\xff.png")
    shutil.copy(next(images.rglob("*.png")), file)
    gallery = Gallery.build(embedder, Catalog.from_folder(tmp_path), tmp_path / "g")
    result = gallery.search([file], 1)
    assert result.paths[0, 0] == file
    assert result.labels[0, 0] == os.fsdecode(b"caf\xe9")
    assert gallery.ids({"label": os.fsdecode(b"caf\xe9")}).tolist() == [0]


def test_changes_keep_ids_and_search_equals_retrieve(gallery):
    everything = np.concatenate([make_vectors(60), make_vectors(30, seed=1)])
    assert gallery.add(make_table(60, 20), vectors=everything[60:80]).tolist() == [*range(60, 80)]
    gallery.remove([5, 61, 0])
    assert gallery.add(make_table(80, 10), vectors=everything[80:]).tolist() == [*range(80, 90)]
    gallery.remove(gallery.ids({"path": names(88, 1)}))
    left = [i for i in range(90) if i not in (5, 61, 0, 88)]
    expected = retrieve(everything[left], queries=everything[:9], k=6)
    for _ in range(2):
        assert len(gallery) == 86
        result = gallery.search(everything[:9], 6)
        assert np.array_equal(result.ids, np.array(left)[expected.ids])
        assert gallery.rows([61 + 1])["path"] == names(62, 1)
        gallery.verify()
        gallery.compact()
    assert len(gallery._snapshot.segments) == 1
    assert not len(gallery._snapshot.deleted)
    again = Gallery.open(gallery.path)
    assert np.array_equal(again.search(everything[:9], 6).ids, result.ids)


def test_update_embeds_again_and_gives_new_ids(gallery):
    new = make_vectors(3, seed=5)
    assert gallery.add(make_table(58, 3), vectors=new, replace=True).tolist() == [60, 61, 62]
    assert len(gallery) == 61
    assert gallery.ids({"path": names(58, 3)}).tolist() == [60, 61, 62]
    assert gallery.search(new, 1).ids.ravel().tolist() == [60, 61, 62]


@pytest.mark.parametrize(
    ("change", "token"),
    [
        (lambda g: g.remove([3, 99]), "99"),
        (lambda g: g.remove(g.ids() > 57), "bool"),
        (lambda g: g.rows([1.5]), "float64"),
        (lambda g: g.add(make_table(59, 2), vectors=make_vectors(2)), "already in the gallery"),
        (lambda g: g.add(make_table(0, 0), vectors=make_vectors(0)), "no images"),
        (
            lambda g: g.add(["/x.png", "/x.png"], vectors=make_vectors(2)),
            "duplicate images: /x.png",
        ),
        (lambda g: g.add(make_table(60, 2), vectors=make_vectors(3)), r"vectors must be \[2, 8\]"),
        (lambda g: g.add(make_table(60, 1), vectors=make_vectors(1) * np.nan), "NaN"),
        (lambda g: g.add("/x.png"), "no such file or folder: /x.png"),
        (lambda g: g.add(["/x.png"]), "/x.png: no such file"),
        (lambda g: g.search(make_vectors(1), 0), "k must be"),
        (lambda g: g.search(make_vectors(1)[:, :4]), r"vectors must be \[1, 8\]"),
        (lambda g: g.search(make_vectors(1) * np.inf), "NaN or infinite"),
        (lambda g: g.search("/x.png"), "/x.png: no such file"),
        (lambda g: g.search(make_vectors(1), where={"lable": "class1"}), "did you mean 'label'"),
        (lambda g: g.search(make_vectors(1), where={"label": "clas1"}), "did you mean 'class1'"),
        (lambda g: g.search(make_vectors(1), where={"label": []}), "no value for label"),
        (lambda g: g.duplicates(1.5), "from −1 to 1, got 1.5"),
        (lambda g: g.search(make_vectors(1), expand=-1), "expand must be"),
        (lambda g: g.search(make_vectors(1), 1001, rerank=True), "up to 1000"),
    ],
)
def test_invalid_arguments_change_nothing(gallery, change, token):
    before = sorted(gallery.path.rglob("*"))
    with pytest.raises(ValueError, match=token):
        change(gallery)
    assert len(Gallery.open(gallery.path)) == 60
    assert sorted(gallery.path.rglob("*")) == before


def test_bad_images_raise_or_are_skipped(embedder, images, tmp_path):
    folder = shutil.copytree(images, tmp_path / "images")
    bad = folder / "class00" / "bad.png"
    bad.write_bytes(b"no image")
    catalog = Catalog.from_folder(folder)
    with pytest.raises(ValueError, match=r"bad\.png: not an image"):
        Gallery.build(embedder, catalog, tmp_path / "g")
    with pytest.raises(ValueError, match="not finished"):
        Gallery.open(tmp_path / "g")
    gallery = Gallery.build(embedder, catalog, tmp_path / "g", bad_images="skip")
    assert len(gallery) == len(catalog) - 1
    assert [one.path for one in gallery.skipped] == [str(bad)]
    assert "not an image" in gallery.skipped[0].reason
    assert len(gallery.add([bad], bad_images="skip")) == 0
    assert str(bad) not in gallery.search([catalog.file(0)], 48).paths
    with pytest.raises(ValueError, match="1 image cannot be read: "):
        Gallery.build(embedder, [bad], tmp_path / "h", bad_images="skip")


def test_another_embedder_is_rejected(gallery, embedder):
    same = make_embedder()
    assert same.fingerprint() == embedder.fingerprint()
    assert Gallery.open(gallery.path, same).embedder is same
    for other in (make_embedder(seed=1), make_embedder(flip_tta=True)):
        with pytest.raises(ValueError, match="did not build"):
            Gallery.open(gallery.path, other)
    # A replaced embedder folder is rejected as well.
    make_embedder(seed=1).save(gallery.path / "embedder")
    opened = Gallery.open(gallery.path)
    assert len(opened.search(make_vectors(1), 2)) == 1
    with pytest.raises(ValueError, match="did not build"):
        opened.search([np.zeros((24, 24, 3), np.uint8)])


def test_build_rejects_existing_files(gallery, embedder, tmp_path):
    for place, token in (
        (gallery.path, "already a gallery"),
        (gallery.path / "gallery.json", "is a file"),
        (tmp_path, "other files"),
    ):
        with pytest.raises(ValueError, match=token):
            Gallery.build(embedder, make_table(0, 2), place, vectors=make_vectors(2))
    with pytest.raises(ValueError, match="no gallery"):
        Gallery.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"gallery\.json"):
        Gallery.open(tmp_path)


def test_damaged_manifest_is_rejected(gallery):
    file, draw = gallery.path / "gallery.json", np.random.default_rng(0)
    content = file.read_bytes()
    flips = []
    for place in draw.integers(len(content), size=200):
        flips.append(bytearray(content))
        flips[-1][place] ^= 1 << int(draw.integers(8))
    for damaged in (*flips, content[:-20], b""):
        file.write_bytes(damaged)
        with pytest.raises(DamagedGalleryError, match=r"gallery\.json is damaged"):
            Gallery.open(gallery.path)
    other = json.loads(content)
    del other[CHECKSUM]
    file.write_bytes(json_with_checksum({**other, "version": 2}))
    with pytest.raises(ValueError, match="format version 2"):
        Gallery.open(gallery.path)


def test_manifest_rejects_path_traversal_and_repeated_segments(gallery):
    current = gallery._snapshot.manifest
    (info,) = current.segments
    renamed = [dataclasses.replace(info, name=name) for name in ("../../etc", "", "A" * 32)]
    for segments in (*((one,) for one in renamed), (info, info)):
        changed = dataclasses.replace(current, segments=segments, next_id=120)
        manifest.write_manifest(gallery.path, changed)
        with pytest.raises(DamagedGalleryError, match=r"invalid segment|ids are not"):
            Gallery.open(gallery.path)


def test_truncated_and_missing_files_are_detected(gallery):
    gallery.remove([3])
    home = gallery.path / "segments" / gallery._snapshot.manifest.segments[0].name
    for file in (*home.iterdir(), *gallery.path.glob("deleted-*.npy")):
        content = file.read_bytes()
        for broken in (content[:-1], content + b"\0", b""):
            file.write_bytes(broken)
            with pytest.raises(ValueError, match=rf"{file.name} is damaged: it has"):
                Gallery.open(gallery.path)
        file.unlink()
        with pytest.raises(ValueError, match=rf"{file.name} is missing"):
            Gallery.open(gallery.path)
        file.write_bytes(content)
    Gallery.open(gallery.path).verify()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_bit_flips_never_reach_a_new_gallery(tmp_path, similarity):
    embedder = make_embedder(normalize=similarity == "cosine")
    built = Gallery.build(embedder, make_table(0, 60), tmp_path / "g", vectors=make_vectors(60))
    built.remove([3, 7])
    queries = make_vectors(2, seed=1)
    expected = built.search(queries, 60).ids
    home = built.path / "segments" / built._snapshot.manifest.segments[0].name
    sealed = (built.path / "gallery.json").read_bytes()
    draw = np.random.default_rng(0)

    def read():
        opened = Gallery.open(built.path)
        result = opened.search(queries, 60)
        return result.ids, result.paths, opened.ids({"label": "class1"}), opened.duplicates(0.9)

    def flips(content):
        header = draw.integers(min(128, len(content)), size=10)
        for place in (*header, *draw.integers(len(content), size=15)):
            flipped = bytearray(content)
            flipped[place] ^= 1 << draw.integers(8)
            yield bytes(flipped)

    for file in (*home.iterdir(), *built.path.glob("deleted-*.npy")):
        content = file.read_bytes()
        for flipped in flips(content):
            file.write_bytes(flipped)
            try:
                ids = read()[0]
            except (DamagedGalleryError, UsageError):  # such as no image of class1
                pass
            else:
                assert file.name in ("vectors.npy", "squares.npy", "metadata.arrow")
                if file.name == "metadata.arrow":
                    assert np.array_equal(ids, expected)
            for change in (
                built.verify,
                built.compact,
                lambda: built.add(make_table(60, 60), vectors=make_vectors(60)),
            ):
                with pytest.raises(DamagedGalleryError, match="index the images again"):
                    change()
            if file.name not in ("vectors.npy", "squares.npy"):  # which removing does not read
                with pytest.raises(DamagedGalleryError):
                    built.remove([5])
            assert (built.path / "gallery.json").read_bytes() == sealed
        file.write_bytes(content)
    assert np.array_equal(read()[0], expected)


def test_replaced_segments_stay_for_a_grace_period(gallery, monkeypatch):
    (old,) = (gallery.path / "segments").iterdir()
    gallery.compact()
    (gallery.path / "segments" / ("0" * 32)).mkdir()  # of a writer that was killed
    gallery.remove([1])
    assert (old / "vectors.npy").exists()
    assert len(list((gallery.path / "segments").iterdir())) == 2
    monkeypatch.setattr(manifest, "GRACE", 0)
    gallery.remove([2])
    named = [info.name for info in gallery._snapshot.manifest.segments]
    assert [path.name for path in (gallery.path / "segments").iterdir()] == named
    Gallery.open(gallery.path).verify()


def test_open_gallery_stays_at_its_version(gallery, monkeypatch):
    queries = make_vectors(4, seed=9)
    reader = Gallery.open(gallery.path)
    before = reader.search(queries, 60)
    gallery.remove(range(30))
    gallery.add(make_table(60, 50), vectors=make_vectors(50, seed=2))
    monkeypatch.setattr(manifest, "GRACE", 0)
    for _ in range(2):  # then all files of the reader's version are unlinked
        gallery.compact()
    after = reader.search(queries, 60)
    assert np.array_equal(before.ids, after.ids)
    assert np.array_equal(before.paths, after.paths)
    assert len(reader) == 60
    reader.verify()  # the current version, not the unlinked one
    reader.refresh()
    assert len(reader) == 80
    assert np.array_equal(reader.search(queries, 9).ids, gallery.search(queries, 9).ids)


def test_rebuilt_gallery_rejects_changes_until_refresh(gallery):
    reader = Gallery.open(gallery.path)
    old = reader.embedder.fingerprint()
    shutil.rmtree(gallery.path)
    other = make_embedder(seed=1)
    Gallery.build(other, make_table(0, 5), gallery.path, vectors=make_vectors(5))
    assert reader.embedder.fingerprint() == old
    for change in (
        lambda: reader.add(make_table(5, 1), vectors=make_vectors(1)),
        lambda: reader.add(make_table(0, 1), vectors=make_vectors(1), replace=True),
        lambda: reader.remove([0]),
        reader.compact,
    ):
        with pytest.raises(ValueError, match=r"refresh\(\)"):
            change()
    assert len(Gallery.open(gallery.path)) == 5
    reader.refresh()
    assert len(reader) == 5
    assert reader.embedder.fingerprint() == other.fingerprint() != old


def test_refresh_reads_the_calibration_of_a_rebuilt_gallery(tmp_path):
    vectors, table = make_vectors(60), make_table(0, 60)
    embedder = Embedder.create("vectors", None, weights="none", input_dim=DIM)
    embedder.calibrate(VectorCatalog.from_arrays(vectors, [str(row // 5) for row in range(60)]))
    Gallery.build(embedder, table, tmp_path / "gallery", vectors=vectors)
    reader = Gallery.open(tmp_path / "gallery")
    assert reader.calibration is not None
    shutil.rmtree(reader.path)
    Gallery.build(make_embedder(seed=1), table, reader.path, vectors=vectors)
    reader.refresh()
    assert reader.calibration is None


def test_open_retries_after_a_concurrent_change(gallery, monkeypatch):
    old = manifest.read_manifest(gallery.path)
    gallery.compact()
    answers = iter([old, manifest.read_manifest(gallery.path)])
    monkeypatch.setattr(snapshot, "read_manifest", lambda folder: next(answers))
    assert len(Gallery.open(gallery.path)) == 60


def test_search_in_threads_during_changes(gallery):
    queries, problems, done = make_vectors(3, seed=4), [], threading.Event()
    vectors = gallery.vectors([3, 59])

    def read():
        while not done.is_set():
            result = gallery.search(queries, 5)
            paths = {f"/images/{number:05d}.png" for number in result.ids.ravel() if number < 60}
            same = paths <= set(result.paths.ravel())
            same &= np.array_equal(gallery.vectors([3, 59]), vectors)
            same &= gallery.rows([7, 42], ["path"])["path"] == [*names(7, 1), *names(42, 1)]
            if not same:
                problems.append(result)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(10):
        ids = gallery.add(make_table(60 + turn, 1), vectors=make_vectors(1, seed=turn))
        gallery.remove(ids)
        gallery.compact()
    done.set()
    for reader in readers:
        reader.join()
    assert not problems
    assert len(gallery) == 60


def test_directory_fsync_failure_does_not_fail_the_change(gallery, monkeypatch):
    fsync = os.fsync

    def no_folders(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", no_folders)
    gallery.remove([1, 2, 3])
    gallery.add(make_table(60, 1), vectors=make_vectors(1))
    assert len(gallery) == len(Gallery.open(gallery.path)) == 58


def test_lock_timeout_names_the_writer(gallery, monkeypatch):
    monkeypatch.setattr(manifest, "LOCK_SECONDS", 0.1)
    lines = []
    with (
        manifest.write_lock(gallery.path, print),
        pytest.raises(ValueError, match=rf"process {os.getpid()} "),
    ):
        gallery.remove([1], report=lines.append)
    assert "0.1 s" in lines[0]
    assert len(Gallery.open(gallery.path)) == 60


def test_adding_rewrites_only_small_segments(gallery, monkeypatch):
    monkeypatch.setattr(changes, "MAX_MERGED_ROWS", 40)
    first = gallery._snapshot.manifest.segments[0]
    file = gallery.path / "segments" / first.name / "vectors.npy"
    before = os.stat(file)
    for turn in range(12):
        gallery.add(make_table(60 + 5 * turn, 5), vectors=make_vectors(5, seed=turn))
        assert os.stat(file).st_ino == before.st_ino
    sizes = [info.rows for info in gallery._snapshot.manifest.segments]
    assert sizes[0] == 60
    assert sum(sizes) == 120
    assert len(sizes) <= 5
    expected = retrieve(
        np.concatenate([make_vectors(60), *(make_vectors(5, seed=t) for t in range(12))]),
        queries=make_vectors(3, seed=50),
    )
    assert np.array_equal(gallery.search(make_vectors(3, seed=50)).ids, expected.ids)


@pytest.fixture
def indexed(monkeypatch):
    """Build indexes for small galleries, too."""
    monkeypatch.setattr(indexes, "MIN_INDEXED_ROWS", 500)


@pytest.mark.parametrize(
    "kind", ["HNSW16", "IVF8,Flat", "IVF8,PQ4x4", "PCA6,SQ8", "PCA5,Flat", "BFlat"]
)
def test_index_candidates_are_rescored_exactly(embedder, tmp_path, indexed, kind):
    centers = make_vectors(40, seed=7) * 2
    vectors = (centers[np.arange(800) % 40] + make_vectors(800)).astype(np.float32)
    gallery = Gallery.build(embedder, make_table(0, 800), tmp_path / "g", kind, vectors=vectors)
    assert f"index {kind})" in repr(gallery)
    queries = vectors[:60] + make_vectors(60, seed=3) * 0.1
    expected = retrieve(vectors, queries=queries, k=10)
    result = Gallery.open(tmp_path / "g").search(queries, 10)
    hits = np.mean([np.isin(a, b).mean() for a, b in zip(result.ids, expected.ids, strict=True)])
    assert hits > (0.9 if kind in ("HNSW16", "IVF8,Flat") else 0.6)
    whole = retrieve(vectors, queries=queries, k=800)
    by_id = np.take_along_axis(whole.similarities, np.argsort(whole.ids, 1), 1)
    expected_scores = np.take_along_axis(by_id, result.ids, 1).ravel()
    np.testing.assert_allclose(result.similarities.ravel(), expected_scores, atol=1e-6)
    gone = np.unique(expected.ids[:10, 0])
    gallery.remove(gone)
    ids = gallery.add(make_table(800, 60), vectors=queries)
    again = gallery.search(queries, 10)
    assert np.array_equal(again.ids[:, 0], ids)
    assert not np.isin(again.ids, gone).any()
    some = gallery.search(queries, 3, where={"path": names(5, 30)})  # few, so they are scanned
    allowed = np.setdiff1d(np.arange(5, 35), gone)
    exact = retrieve(vectors[allowed], queries=queries, k=3)
    assert np.array_equal(some.ids, allowed[exact.ids])
    gallery.verify()
    gallery.compact()
    assert [info.rows for info in gallery._snapshot.manifest.segments] == [len(gallery)]
    assert np.mean(gallery.search(queries, 1).ids[:, 0] == ids) > 0.9


@pytest.mark.parametrize(
    ("kind", "token"),
    [
        ("HSNW32", "unknown index 'HSNW32'"),
        ("IVF16,PQ3", "8 dimensions"),
        ("IVF64,Flat", "64 images for training, got 60"),
        ("BHNSW32", "unknown index"),
        ("PQ4x4", "unknown index"),  # faiss cannot filter it
    ],
)
def test_invalid_index_is_rejected_before_embedding(embedder, tmp_path, kind, token):
    with pytest.raises(ValueError, match=token):
        Gallery.build(embedder, make_table(0, 60), tmp_path / "g", kind)
    assert not (tmp_path / "g").exists()


def test_auto_chooses_by_size():
    assert indexes.resolve("auto", 100_000) == ""
    assert indexes.resolve("auto", 1_000_000) == "HNSW32"
    assert indexes.resolve("auto", 16_000_000) == "IVF16384,SQ8"
    assert indexes.resolve("HNSW32", 9_999) == ""
    assert indexes.resolve("HNSW32", 10_000) == "HNSW32"


def test_empty_gallery(gallery):
    gallery.remove(gallery.ids())
    gallery.compact()
    for options in ({}, {"expand": 2}, {"rerank": True}):
        result = gallery.search(make_vectors(2), 3, **options)
        assert result.ids.tolist() == [[-1], [-1]]
        assert result.paths.tolist() == [[None], [None]]
    assert gallery.duplicates().groups == []
    assert gallery.add(make_table(0, 2), vectors=make_vectors(2)).tolist() == [60, 61]
    assert gallery.search(make_vectors(2), 1).ids.ravel().tolist() == [60, 61]


def test_compact_reports_the_index(gallery, monkeypatch):
    lines = []
    gallery.compact(report=lines.append)
    monkeypatch.setattr(indexes, "MAX_FLAT_ROWS", 50)
    monkeypatch.setattr(indexes, "MIN_INDEXED_ROWS", 50)
    gallery.compact(report=lines.append)
    assert lines == [
        "index: Flat for 60 images: every search is exact",
        "index: HNSW32 for 60 images: approximate, with exact similarities, recall@10 1.000",
    ]


def test_duplicates_are_exact(gallery):
    copies = gallery.vectors([3, 3, 8])
    gallery.add(make_table(60, 3), vectors=copies)
    result = gallery.duplicates()
    assert [group.tolist() for group in result.groups] == [[3, 60, 61], [8, 62]]
    assert result.pairs[:4].tolist() == [[3, 60], [3, 61], [8, 62], [60, 61]]
    assert result.paths[60] == names(60, 1)[0]
    gallery.remove([60])
    assert [group.tolist() for group in gallery.duplicates().groups] == [[3, 61], [8, 62]]
    everything = gallery.duplicates(-1)
    assert len(everything.pairs) == 62 * 61 // 2
    assert (np.diff(everything.similarities) <= 0).all()


def test_duplicates_allow_for_rounding_of_the_cosine(gallery):
    gallery.add(make_table(60, 60), vectors=gallery.vectors(range(60)))
    result = gallery.duplicates(1)
    assert result.similarities.min() < 1
    assert sorted(result.pairs.tolist()) == [[i, i + 60] for i in range(60)]


@pytest.mark.parametrize("compared", [0, duplicates.MAX_COMPARED_ROWS])
@pytest.mark.parametrize("kind", ["HNSW16", "IVF8,Flat"])
def test_duplicates_with_an_index_are_complete(
    embedder, tmp_path, indexed, monkeypatch, kind, compared
):
    monkeypatch.setattr(duplicates, "MAX_COMPARED_ROWS", compared)
    monkeypatch.setattr(snapshot, "SCAN_FACTOR", 1)
    vectors = make_vectors(1500)
    vectors[300:310] = vectors[:10]
    vectors[400:701] = vectors[400]  # more copies than are searched first
    gallery = Gallery.build(embedder, make_table(0, 1500), tmp_path / "g", kind, vectors=vectors)
    pairs = gallery.duplicates(0.999999).pairs.tolist()
    copies = [[i, j] for i in range(400, 701) for j in range(i + 1, 701)]
    assert sorted(pairs) == [[i, i + 300] for i in range(10)] + copies


def test_euclidean_duplicates(images, tmp_path):
    embedder, vectors = make_embedder(normalize=False), make_vectors(20)
    vectors[7] = vectors[2] + 0.01
    gallery = Gallery.build(embedder, make_table(0, 20), tmp_path / "g", vectors=vectors)
    with pytest.raises(ValueError, match="threshold"):
        gallery.duplicates()
    assert gallery.duplicates(0.1).pairs.tolist() == [[2, 7]]
    np.testing.assert_allclose(gallery.duplicates(0.1).similarities, -0.01 * DIM**0.5, rtol=1e-3)
    files = sorted(images.rglob("*.png"))
    files.append(shutil.copy(files[0], tmp_path / "copy.png"))
    measured = Gallery.build(embedder, files, tmp_path / "h").duplicates()
    assert measured.threshold_source.startswith("distance")
    assert [0, 48] in measured.pairs.tolist()


def test_expansion_and_reranking_keep_plain_similarities(gallery):
    queries = make_vectors(4, seed=8)
    plain = gallery.search(queries, 60)
    by_id = np.take_along_axis(plain.similarities, np.argsort(plain.ids, 1), 1)
    assert plain.scores is None
    vectors = gallery.vectors(gallery.ids())
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)

    moved = expand_queries(unit, vectors[plain.ids[:, :3]]).astype(np.float32)
    expanded = gallery.search(queries, 5, expand=3)
    expected = retrieve(vectors, queries=moved, k=5)
    assert np.array_equal(expanded.ids, expected.ids)
    np.testing.assert_allclose(expanded.scores, expected.similarities, atol=1e-6)

    reranked = gallery.search(queries, 5, rerank=True)
    distances = np.concatenate([k_reciprocal_distances(q[None], vectors) for q in unit])
    np.testing.assert_allclose(
        -reranked.scores, np.take_along_axis(distances, reranked.ids, 1), atol=1e-6
    )
    np.testing.assert_allclose(-reranked.scores, np.sort(distances, 1)[:, :5], atol=1e-6)

    for result in (expanded, reranked, gallery.search(queries, 5, expand=2, rerank=True)):
        assert np.array_equal(result.similarities, np.take_along_axis(by_id, result.ids, 1))
    few = gallery.search(queries, 5, expand=3, rerank=True, where={"path": names(0, 2)})
    assert sorted(few.ids[0].tolist()) == [-1, -1, -1, 0, 1]
