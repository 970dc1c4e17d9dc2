"""Identification: ranks and rates against a plain loop, distractors of all kinds."""

import json

import numpy as np
import pytest
import torch

from proximetry.faces import identify_people
from proximetry.faces.identify import FAR, read_people
from tests.faces.small import ANGLES, by_angle, lfw, mean_color, save


def reference(probes, labels, distractors):
    """Return ranks of (probe, mate) and TAR at FAR by plain loops; ties are counted as errors."""

    def vectors(angles):
        result = by_angle(torch.tensor(angles, dtype=torch.uint8)[:, None, None, None]).double()
        return [one / one.norm() for one in result]

    def cosine(a, b):
        return float(a @ b)

    probes, distractors = vectors(probes), vectors(distractors)
    ranks, genuine = [], []
    impostors = np.array([cosine(p, d) for p in probes for d in distractors])
    for i, probe in enumerate(probes):
        for j, mate in enumerate(probes):
            if i != j and labels[i] == labels[j]:
                score = cosine(probe, mate) - 1e-12
                ranks.append(1 + sum(cosine(probe, d) >= score for d in distractors))
                genuine.append(score)
    rates = {}
    for far in FAR:
        if far * len(impostors) >= 1:
            good = [g for g in genuine if (impostors >= g).sum() <= far * len(impostors)]
            rates[far] = np.mean(np.array(genuine) >= min(good, default=9))
    return ranks, rates


def test_identification_equals_a_plain_loop(tmp_path):
    """Whole degrees often tie; people with one image are the distractors."""
    rng = np.random.default_rng(0)
    people = {f"P{n}": rng.integers(0, 90, 2 + n % 3).tolist() for n in range(12)}
    alone = {f"Q{n}": [angle] for n, angle in enumerate(rng.integers(0, 180, 40).tolist())}
    results = identify_people(ANGLES, read_people(lfw(tmp_path, people | alone)), batch_size=7)
    labels = [label for label in sorted(people) for _ in people[label]]
    probes = [angle for label in sorted(people) for angle in people[label]]
    ranks, rates = reference(probes, labels, [angle for (angle,) in alone.values()])
    assert results.result.ranks.tolist() == ranks
    assert len(set(ranks)) > 10
    assert results.result.tar_at_far == pytest.approx(rates)
    assert set(rates) == {1e-3}
    document = results.document()
    assert document["rank"] == {str(k): np.mean(np.array(ranks) <= k) for k in (1, 5, 10, 100)}
    assert document["cmc"][4] == document["rank"]["5"]
    assert (document["probes"], document["people"]) == (len(probes), 12)
    assert document["unmeasurable_far"] == [1e-4, 1e-5, 1e-6]


@pytest.fixture
def folder(tmp_path):
    """Probes by color, a folder of distractors, and files of the distractors' vectors."""
    rng = np.random.default_rng(0)
    lfw(tmp_path / "probes", {f"P{n}": rng.integers(0, 256, (3, 3)) for n in range(5)})
    lfw(tmp_path / "probes", {"lonely": rng.integers(0, 256, (1, 3))})
    colors = rng.integers(0, 256, (50, 3))
    for number, color in enumerate(colors):
        save(tmp_path / "distractors" / str(number % 4) / f"{number:02d}.png", color)
    vectors = ((colors - 127.5) / 127.5).astype(np.float32)
    np.save(tmp_path / "plain.npy", vectors)
    np.save(tmp_path / "both.npy", np.concatenate([vectors, vectors], 1))
    np.savez(tmp_path / "both.npz", vectors=np.concatenate([vectors, vectors], 1), paths=["a"])
    mean_color(tmp_path / "m.onnx")
    return tmp_path


def test_distractors_as_images_and_as_vectors_agree(call, folder):
    words = ["faces", "identify", folder / "m.onnx", folder / "probes", "--json", "--distractors"]
    result = {
        name: json.loads(call(*words, folder / name))
        for name in ("distractors", "both.npy", "both.npz", "plain.npy")
    }
    for name, document in result.items():
        assert document["distractors"] == 50
        assert document["trials"] == 30
        for key in ("rank", "cmc", "tar_at_far", "impostor_pairs"):
            assert document[key] == result["distractors"][key]
        assert ("image only" in document["views"]) == (name == "plain.npy")
        assert any("not probes: lonely" in note for note in document["notes"])


def test_lists_of_megaface_and_noises(call, folder):
    """Paths match without their extension, and if the shorter one ends the longer one."""
    names = ["P0/P0_0001.jpg", "P0/P0_0002", "/data/facescrub/P1/P1_0001.jpg", "P1_0003.png"]
    names += [f"P2/P2_000{n}.jpg" for n in (1, 2, 3)]
    (folder / "probes.json").write_text(json.dumps({"id": ["x"], "path": names}))
    distractors = [f"/x/y/{n % 4}/{n:02d}.jpg" for n in range(30)]
    (folder / "megaface_lst").write_text("\n".join(distractors))
    (folder / "noise1.txt").write_text("# wrong people\n\nP2_0002.jpg\nunknown.jpg\n")
    (folder / "noise2.txt").write_text("17\t0/04.jpg\n18\t1/05.jpg\n3/45.jpg\n")
    people = read_people(
        folder / "probes",
        folder / "distractors",
        probe_list=folder / "probes.json",
        distractor_list=folder / "megaface_lst",
        noises=[folder / "noise1.txt", folder / "noise2.txt"],
    )
    assert people.labels == ("P0", "P0", "P1", "P1", "P2", "P2")
    assert [file[-8:] for file in people.files[2:]] == [f"{n:04d}.png" for n in (1, 3, 1, 3)]
    expected = {f"{n % 4}/{n:02d}.png" for n in range(30)} - {"0/04.png", "1/05.png"}
    assert {file[-8:] for file in people.distractors} == expected
    assert any("2 images of" in note and "excluded as noise" in note for note in people.notes)
    words = ["faces", "identify", folder / "m.onnx", folder / "probes"]
    words += ["--distractors", folder / "distractors", "--probe-list", folder / "probes.json"]
    words += ["--distractor-list", folder / "megaface_lst", "--noises", folder / "noise1.txt"]
    document = json.loads(call(*words, "--noises", folder / "noise2.txt", "--json"))
    assert (document["probes"], document["distractors"], document["trials"]) == (6, 28, 6)
    with (folder / "megaface_lst").open("a") as file:
        file.write("\n0/99.jpg")
    assert "1 of 31 images of" in call(*words, code=1)
    document = json.loads(call(*words, "--bad-images", "skip", "--json"))
    assert any("are not in" in note and "0/99" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 images"),
        ('{"id": []}', 'JSON with "path"'),
        ('{"path": [1]}', "not a list of names"),
        ('{"path": ["P0/P0_0001.jpg"', 'JSON with "path"'),
        ("{" * 100_000, 'JSON with "path"'),
        ("P9/P9_0001.jpg", "1 of 1 images"),
    ],
    ids=range(6),
)
def test_damaged_lists(folder, text, message):
    (folder / "list").write_text(text)
    with pytest.raises(ValueError, match=message if text else "no image is left"):
        read_people(folder / "probes", probe_list=folder / "list")


def test_identify_command(call, folder):
    words = ["faces", "identify", folder / "m.onnx", folder / "probes"]
    words += ["--distractors", folder / "distractors", "--out", folder / "x.json"]
    text = call(*words, "--cmc", folder / "cmc.svg")
    assert "15 probes of 5 people, 30 trials, 50 distractors" in text
    rank = json.loads((folder / "x.json").read_text())["rank"]
    assert f"rank-1 {100 * rank['1']:.2f} %" in text
    assert b"<svg" in (folder / "cmc.svg").read_bytes()


def test_unreadable_images_raise_or_are_skipped(call, folder):
    bad = [folder / "probes" / "P0" / "P0_0002.png", folder / "distractors" / "1" / "01.png"]
    words = ["faces", "identify", folder / "m.onnx", folder / "probes"]
    words += ["--distractors", folder / "distractors"]
    before = json.loads(call(*words, "--json"))
    for number, path in enumerate(bad):
        path.write_bytes(b"not an image")
        assert f"{bad[0]}: not an image" in call(*words, code=1)
        result = json.loads(call(*words, "--bad-images", "skip", "--batch-size", "4", "--json"))
        assert len(result["skipped"]) == number + 1
        assert result["trials"] == before["trials"] - 4
        assert result["distractors"] == 50 - number
    (folder / "probes" / "P0" / "P0_0003.png").write_bytes(b"neither")
    result = json.loads(call(*words, "--bad-images", "skip", "--json"))
    assert result["people"] == 4
    assert "1 images have no other image of their person" in result["notes"]
    for path in (folder / "probes").rglob("*.png"):
        path.write_bytes(b"")
    assert "no person has two readable images" in call(*words, "--bad-images", "skip", code=1)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["alone"], 2, "2 people has one image"),
        (["distractors"], 2, "no distractors"),
        (["nowhere"], 2, "nowhere"),
        (["probes", "--distractors", "empty"], 2, "no images in this folder"),
        (["probes", "--distractors", "nowhere"], 2, ".npy or .npz"),
        (["probes", "--distractors", "no.npy"], 2, "no such file"),
        (["probes", "--distractors", "."], 2, "same images"),
        (["probes", "--distractors", "zero.npy"], 1, "[0, 6]"),
        (["probes", "--distractors", "whole.npy"], 1, "int64"),
        (["probes", "--distractors", "wide.npy"], 2, "5 dimensions"),
        (["probes", "--distractors", "both.npy", "--flip", "none"], 2, "3 with --flip none"),
        (["probes", "--distractors", "other.npz"], 2, "'vectors'"),
        (["probes", "--distractors", "broken.npy"], 2, "broken.npy"),
        (["probes", "--distractors", "nan.npy"], 1, "NaN"),
        (["probes", "--cmc", "x.gif"], 2, "got x.gif"),
        (["probes", "--noises", "nothing.txt"], 2, "no such list of images: nothing.txt"),
        (
            ["probes", "--distractors", "both.npy", "--distractor-list", "broken.npy"],
            2,
            "--distractor-list is for a folder",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_identify_usage_errors(call, folder, monkeypatch, words, code, message):
    lfw(folder / "alone", {"a": [1], "b": [2]})
    (folder / "empty").mkdir()
    both = np.load(folder / "both.npy")
    for name, array in {
        "zero": both[:0],
        "whole": both.astype(int),
        "wide": both[:, :5],
        "nan": np.where(np.arange(50)[:, None] == 7, np.nan, both),
    }.items():
        np.save(folder / f"{name}.npy", array)
    np.savez(folder / "other.npz", x=both)
    (folder / "broken.npy").write_bytes((folder / "both.npy").read_bytes()[:200])
    monkeypatch.chdir(folder)
    assert message in call("faces", "identify", "m.onnx", *words, code=code)
