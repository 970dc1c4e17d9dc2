"""Lists of pairs: what they name, and a sentence with the line for every mistake."""

import re

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


def test_lfw_names_images_of_any_extension(tmp_path, images):
    (images / "Ann" / "Ann_0001.png").rename(images / "Ann" / "Ann_0001.JPEG")
    path = write(tmp_path, "2\t1\nAnn\t1\t2\nAnn\t1\tBo\t3\n\nBo\t3\t4\nCy\t1\tBo\t4\n")
    found = read_protocol(path, images)
    assert found.format == "LFW"
    assert found.templates["Ann/Ann_0001"] == (str(images / "Ann" / "Ann_0001.JPEG"),)
    assert [(p.line, p.same, p.fold) for p in found.pairs] == [
        (2, True, "1"),
        (3, False, "1"),
        (5, True, "2"),
        (6, False, "2"),
    ]
    assert found.notes == [f"{path} has 2 folds; the protocol of LFW has 10"]


def test_the_folder_around_the_people_will_do(tmp_path, images):
    path = write(tmp_path, "2 1\nAnn 1 2\nAnn 1 Bo 3\nBo 3 4\nCy 1 Bo 4\n")
    around = tmp_path / "around"
    around.mkdir()
    images.rename(around / "lfw")
    assert len(read_protocol(path, around).pairs) == 4


def test_a_folder_of_one_person_is_no_folder_around(tmp_path):
    for video in "012":
        save(tmp_path / "videos" / "Ann" / video / "1.png", 3)
    text = "Ann/0,Ann/1,1,a\nAnn/0,Ann/2,0,a\nAnn/0,Ann/1,1,b\nAnn/1,Ann/2,0,b"
    found = read_protocol(write(tmp_path, text, "own.csv"), tmp_path / "videos")
    assert len(found.templates) == 3


@pytest.mark.parametrize("wrong", ["", "1, ", "0, "])
def test_ytf_names_videos(tmp_path, wrong):
    """In the corrected list the truth as it was stands before the corrected one."""
    videos = tmp_path / "videos"
    for name in ("Ann/0", "Ann/3", "Bo/1"):
        for frame in range(3):
            save(videos / name / f"aligned_detect_0.{frame}.png", frame)
    lines = [
        f"{fold}, 1, Ann/0, Ann/3, {wrong}1\n{fold}, 2, Ann/3, Bo/1, {wrong}0" for fold in "12"
    ]
    found = read_protocol(write(tmp_path, "\n".join([HEADER, *lines])), videos)
    assert found.format == "YTF"
    assert [p.same for p in found.pairs] == [True, False] * 2
    assert found.folds == ["1", "1", "2", "2"]
    assert len(found.templates["Ann/3"]) == 3


def test_own_lists_are_dealt_out_to_folds_of_both_kinds(tmp_path, images):
    text = "image,image,same\n" + "\n".join(
        ["Ann/Ann_0001.jpg,Ann/Ann_0002.jpg,yes"] * 25 + ["Ann/Ann_0001,Bo/Bo_0001,no"] * 14
    )
    found = read_protocol(write(tmp_path, text, "own.csv"), images)
    assert found.format == "CSV"
    assert found.pairs[0].line == 2
    assert found.notes == []
    for fold in map(str, range(1, 11)):
        kinds = [pair.same for pair in found.pairs if pair.fold == fold]
        assert (kinds.count(True), kinds.count(False)) in [(3, 2), (3, 1), (2, 1)]
    few = read_protocol(write(tmp_path, own(3), "few.csv"), images)
    assert few.notes == [f"{tmp_path / 'few.csv'} has 3 folds"]


def test_own_folds_videos_and_quoted_names(tmp_path, images):
    save(images / "Smith, J." / "a b.png", 3)
    text = '"Smith, J./a b",Ann,1,x\nBo,Ann,0,x\nCy,Ann,0,y\nBo,Bo/Bo_0001,true,y\n'
    found = read_protocol(write(tmp_path, text, "own.csv"), images)
    assert found.fold_names == ["x", "y"]
    assert len(found.templates["Ann"]) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: '' begins no list of pairs"),
        ("what is this", "line 1: 'what is this' begins no list of pairs"),
        ("10 300\nAnn 1 2\n", "promises 10 × 2 × 300 = 6000 pairs, the file has 1"),
        ("1 1\nAnn 1 2\nAnn 1 Bo\n", "line 3: expected 'name1 i name2 j'"),
        ("1 1\nAnn 1 2\nAnn 1 Bo 1\n", "has 1 folds: the threshold of a fold is chosen on the"),
        (f"{HEADER}\n1, 1, Ann, Bo\n", "line 2: expected 'split number, pair number"),
        (f"{HEADER}\n1, 1, Ann, Bo, 7\n", "line 2: '7' says neither same"),
        ("Ann,Bo,1\nAnn,Bo,maybe\n", "line 2: 'maybe' says neither same"),
        ("Ann,Bo,1\nAnn,Bo\n", "line 2: expected image,image,same"),
        ("Ann,Bo,1\nAnn,Bo,0,3\n", "line 2: expected image,image,same"),
        ("Ann,Bo,1,3\nAnn,Bo,0,\n", "line 2: the fold is empty"),
        ("Ann,,1\n", "line 1: an image without a name"),
        ("Ann,Ann,1\n", "line 1: compares Ann with itself"),
        ('Ann,"Bo"x,1\n', "line 1: not CSV"),
        ("a,b,same\n", "has no pairs"),
        ("Ann,Bo,0,1\nAnn,Cy,1,1\nAnn,Bo,0,2\n", "none in fold 2 is of the same person"),
    ],
)
def test_malformed_lists_are_refused_with_the_line(tmp_path, images, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_protocol(path, images)
    assert str(caught.value).startswith(str(path))


def test_files_that_are_no_lists(tmp_path, images):
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="no text in UTF-8"):
        read_protocol(tmp_path / "x.txt", images)
    with pytest.raises(ValueError, match=r"there is no list of pairs .*nothing.txt"):
        read_protocol(tmp_path / "nothing.txt", images)
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        read_protocol(tmp_path / "x.txt", tmp_path / "nowhere")


def test_what_is_missing_is_refused_together_or_skipped_and_listed(tmp_path, images):
    (images / "empty").mkdir()
    save(images / "Bo" / "Bo_0002.gif", 3)
    text = (
        own() + "\nAnn/Ann_0009,Ann,1\nempty,Bo/Bo_0001,0\nBo/Bo_0002,Bo/Bo_0001,1\nAnn/x,empty,0"
    )
    path = write(tmp_path, text, "own.csv")
    with pytest.raises(ValueError, match="4 of 8 pairs") as caught:
        read_protocol(path, images)
    assert str(caught.value) == (
        f"{path}: 4 of 8 pairs cannot be compared with the images in {images} (line 5: there is no "
        "image Ann/Ann_0009, line 6: the video empty has no frames, line 7: Bo/Bo_0002 is there "
        "as Bo_0002.gif and Bo_0002.png and 1 more); --bad-images skip leaves such pairs out"
    )
    found = read_protocol(path, images, "skip")
    assert len(found.pairs) == 4
    assert len(found.skipped) == 4
    assert found.skipped[3] == "line 8: there is no image Ann/x"
    assert "empty" not in found.templates


def test_a_fold_that_loses_a_kind_to_missing_images_is_refused(tmp_path, images):
    text = "2 1\nAnn 1 2\nAnn 1 Bo 3\nBo 3 9\nCy 1 Bo 4\n"
    with pytest.raises(ValueError, match="that are left, none in fold 2 is of the same person"):
        read_protocol(write(tmp_path, text), images, "skip")
