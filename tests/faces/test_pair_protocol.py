"""Pair lists: LFW, YTF, CSV, .bin sets, missing images and malformed lines."""

import pickle

import pytest

from proximetry.faces import read_protocol
from tests.faces.small import lfw, save

HEADER = "split number, pair number, first name, second name, is same"


@pytest.fixture
def images(tmp_path):
    return lfw(tmp_path / "images", {name: [1, 2, 3, 4] for name in ("Ann", "Bo", "Cy")})


def write(tmp_path, text, name="pairs.txt"):
    path = tmp_path / name
    path.write_text(text)
    return path


def own(count=2):
    return "\n".join(
        f"Ann/Ann_0001,Ann/Ann_000{2 + i % 3},1\nAnn/Ann_0001,Bo/Bo_0001,0" for i in range(count)
    )


def test_lfw_images_of_any_extension(tmp_path, images):
    (images / "Ann" / "Ann_0001.png").rename(images / "Ann" / "Ann_0001.JPEG")
    path = write(tmp_path, "2\t1\nAnn\t1\t2\nAnn\t1\tBo\t3\n\nBo\t3\t4\nCy\t1\tBo\t4\n")
    protocol = read_protocol(path, images)
    assert protocol.format == "LFW"
    assert protocol.templates["Ann/Ann_0001"] == (str(images / "Ann" / "Ann_0001.JPEG"),)
    assert [(p.line, p.same, p.fold) for p in protocol.pairs] == [
        (2, True, "1"),
        (3, False, "1"),
        (5, True, "2"),
        (6, False, "2"),
    ]


def test_images_in_a_subfolder_of_the_folder(tmp_path, images):
    path = write(tmp_path, "2 1\nAnn 1 2\nAnn 1 Bo 3\nBo 3 4\nCy 1 Bo 4\n")
    (tmp_path / "around").mkdir()
    images.rename(tmp_path / "around" / "lfw")
    assert len(read_protocol(path, tmp_path / "around").pairs) == 4
    # The folder of a person is not a folder of people.
    for video in "012":
        save(tmp_path / "videos" / "Ann" / video / "1.png", 3)
    text = "Ann/0,Ann/1,1,a\nAnn/0,Ann/2,0,a\nAnn/0,Ann/1,1,b\nAnn/1,Ann/2,0,b"
    protocol = read_protocol(write(tmp_path, text, "own.csv"), tmp_path / "videos")
    assert len(protocol.templates) == 3


@pytest.mark.parametrize("labels", ["published", "both", "corrected"])
def test_ytf_videos(tmp_path, labels):
    """The corrected list has the published value before the corrected one."""
    videos = tmp_path / "videos"
    for name in ("Ann/0", "Ann/3", "Bo/1"):
        for frame in range(3):
            save(videos / name / f"aligned_detect_0.{frame}.png", frame)
    extra = ["", ""] if labels == "published" else [", 0", ", 1"]
    lines = [
        f"{fold}, 1, Ann/0, Ann/3, 1{extra[0]}\n{fold}, 2, Ann/3, Bo/1, 0{extra[1]}"
        for fold in "12"
    ]
    path, corrected = write(tmp_path, "\n".join([HEADER, *lines])), labels == "corrected"
    protocol = read_protocol(path, videos, corrected_labels=corrected)
    assert protocol.format == "YTF"
    assert [p.same for p in protocol.pairs] == [not corrected, corrected] * 2
    assert len(protocol.notes) == (labels != "published")
    assert (
        labels == "published" or f"the {labels.replace('both', 'published')}" in protocol.notes[0]
    )
    assert protocol.folds == ["1", "1", "2", "2"]
    assert len(protocol.templates["Ann/3"]) == 3


def test_custom_lists_are_split_into_folds_of_both_kinds(tmp_path, images):
    text = "image,image,same\n" + "\n".join(
        ["Ann/Ann_0001.jpg,Ann/Ann_0002.jpg,yes"] * 25 + ["Ann/Ann_0001,Bo/Bo_0001,no"] * 14
    )
    protocol = read_protocol(write(tmp_path, text, "own.csv"), images)
    assert protocol.format == "CSV"
    assert protocol.pairs[0].line == 2
    for fold in map(str, range(1, 11)):
        kinds = [pair.same for pair in protocol.pairs if pair.fold == fold]
        assert (kinds.count(True), kinds.count(False)) in [(3, 2), (3, 1), (2, 1)]
    assert len(read_protocol(write(tmp_path, own(3), "few.csv"), images).fold_names) == 3


def test_custom_folds_videos_and_quoted_names(tmp_path, images):
    save(images / "Smith, J." / "a b.png", 3)
    text = '"Smith, J./a b",Ann,1,x\nBo,Ann,0,x\nCy,Ann,0,y\nBo,Bo/Bo_0001,true,y\n'
    protocol = read_protocol(write(tmp_path, text, "own.csv"), images)
    assert protocol.fold_names == ["x", "y"]
    assert len(protocol.templates["Ann"]) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ("what is this", "line 1: 'what is this'"),
        ("10 300\nAnn 1 2\n", "6000 pairs"),
        ("1 1\nAnn 1 2\nAnn 1 Bo\n", "line 3"),
        ("1 1\nAnn 1 2\nAnn 1 Bo 1\n", "has 1 folds"),
        (f"{HEADER}\n1, 1, Ann, Bo\n", "line 2: expected split,pair"),
        ("Ann,Bo,1\nAnn,Bo,maybe\n", "line 2: same is 'maybe'"),
        ("Ann,Bo,1\nAnn,Bo\n", "line 2: expected image,image,same"),
        ("Ann,Bo,1\nAnn,Bo,0,3\n", "line 2: expected a fold"),
        ("Ann,Bo,1,3\nAnn,Bo,0,\n", "line 2: expected a fold"),
        ("Ann,Ann,1\n", "line 1: expected two images"),
        ('Ann,"Bo"x,1\n', "line 1: ',' expected"),
        ("a,b,same\n", "has no pairs"),
        ("Ann,Bo,0,1\nAnn,Cy,1,1\nAnn,Bo,0,2\n", "fold 2 has no pair of the same person"),
    ],
)
def test_malformed_lists_raise_with_the_line(tmp_path, images, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=message) as caught:
        read_protocol(path, images)
    assert str(caught.value).startswith(str(path))


def test_lists_without_corrected_labels(tmp_path, images):
    for text, folder in ((own(), images), ("", None)):
        path = write(tmp_path, text, "own.csv")
        with pytest.raises(ValueError, match="no corrected labels"):
            read_protocol(path, folder, corrected_labels=True)


def test_missing_list_and_folder(tmp_path, images):
    with pytest.raises(ValueError, match=r"nothing\.txt"):
        read_protocol(tmp_path / "nothing.txt", images)
    with pytest.raises(ValueError, match="nowhere"):
        read_protocol(tmp_path / "x.txt", tmp_path / "nowhere")


def test_missing_images_raise_or_their_pairs_are_skipped(tmp_path, images):
    (images / "empty").mkdir()
    save(images / "Bo" / "Bo_0002.gif", 3)
    bad = ["Ann/Ann_0009,Ann,1", "empty,Bo/Bo_0001,0", "Bo/Bo_0002,Bo/Bo_0001,1", "Ann/x,empty,0"]
    path = write(tmp_path, "\n".join([own(), *bad]), "own.csv")
    with pytest.raises(ValueError, match="4 of 8 pairs") as caught:
        read_protocol(path, images)
    lines = (
        "line 5: no such image: Ann/Ann_0009",
        "line 6: the video empty has no frames",
        "line 7: Bo/Bo_0002 is ambiguous: Bo_0002.gif and Bo_0002.png",
    )
    assert all(line in str(caught.value) for line in lines)
    protocol = read_protocol(path, images, "skip")
    assert len(protocol.pairs) == 4
    assert protocol.skipped == (*lines, "line 8: no such image: Ann/x")
    assert "empty" not in protocol.templates
    text = "2 1\nAnn 1 2\nAnn 1 Bo 3\nBo 3 9\nCy 1 Bo 4\n"
    with pytest.raises(ValueError, match=r"fold 2 has no pair of the same person after skipping"):
        read_protocol(write(tmp_path, text), images, "skip")


def test_bin_set_has_ten_blocks_of_pairs_as_folds(tmp_path):
    path = tmp_path / "lfw.bin"
    same = [n % 2 == 0 for n in range(27)]
    path.write_bytes(pickle.dumps(([b""] * 54, same), 3))
    protocol = read_protocol(path)
    assert (protocol.format, protocol.title, protocol.notes) == ("BIN", "lfw.bin", ())
    # The folds of scikit-learn's KFold: the first seven have three pairs.
    assert [protocol.folds.count(str(n)) for n in range(1, 11)] == [3] * 7 + [2] * 3
    assert protocol.folds == sorted(protocol.folds, key=int)
    assert [pair.same for pair in protocol.pairs] == same
    last = protocol.pairs[-1]
    assert (last.line, last.first, last.second) == (27, "52", "53")
    assert protocol.templates["53"] == (f"{path}::53",)


def test_bin_set_ordered_by_kind(tmp_path):
    (tmp_path / "x.bin").write_bytes(pickle.dumps(([b""] * 40, [True] * 12 + [False] * 8), 3))
    protocol = read_protocol(tmp_path / "x.bin")
    assert protocol.folds == [*"112233445678", *"12345678"]
    assert "ordered by kind" in protocol.notes[0]
    (tmp_path / "x.bin").write_bytes(pickle.dumps(([b""] * 4, [True] * 2), 3))
    with pytest.raises(ValueError, match="has 1 folds"):
        read_protocol(tmp_path / "x.bin")
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ValueError, match=r"not a \.bin verification set"):
        read_protocol(tmp_path / "x.txt")
