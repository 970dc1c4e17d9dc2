"""Verification: an example by hand, videos, unreadable images, the command."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import helper
from PIL import Image

from proximetry.faces import open_embedder, read_protocol, verify_pairs
from proximetry.models import Embedder
from tests.faces.small import ANGLES, lfw, mean_color, save

COS = np.cos(np.deg2rad([20, 40, 50, 60]))


def by_hand(tmp_path):
    """Ten folds of a same pair 20° and a different one 60° apart; in the first, 50° and 40°."""
    lines = ["10\t1"]
    for fold in range(10):
        same, different = (50, 40) if fold == 0 else (20, 60)
        lfw(tmp_path / "faces", {f"A{fold}": [10, 10 + same], f"B{fold}": [10 + different]})
        lines += [f"A{fold}\t1\t2", f"A{fold}\t1\tB{fold}\t1"]
    (tmp_path / "pairs.txt").write_text("\n".join(lines))
    return read_protocol(tmp_path / "pairs.txt", tmp_path / "faces")


def test_verification_example_by_hand(tmp_path):
    results = verify_pairs(ANGLES, by_hand(tmp_path), batch_size=7)
    r = results.result
    # Nine folds are perfect between cos 20° and cos 60°, where both pairs of the first are wrong.
    assert r.thresholds[0] == pytest.approx((COS[0] + COS[3]) / 2, abs=1e-6)
    # The others see one wrong decision between 20° and 40°, two between 40° and 50°, one below;
    # the highest of the best thresholds is taken.
    assert r.thresholds[1:] == pytest.approx((COS[0] + COS[1]) / 2, abs=1e-6)
    assert r.fold_accuracies.tolist() == [0, *[1] * 9]
    assert r.accuracy == pytest.approx(0.9)
    assert r.standard_error == pytest.approx(0.1)  # √(9 · 0.1² + 0.9²) / √9 / √10
    assert r.eer == pytest.approx(0.1)
    assert r.auc == pytest.approx(0.99)  # 1 of 100 comparisons is wrong
    assert r.tar_at_far == {0.1: 1.0}
    document = results.document()
    assert [fold["fold"] for fold in document["folds"]] == [str(1 + i) for i in range(10)]
    assert document["images"] == 30
    assert document["notes"] == []


def test_video_is_the_mean_of_its_frames(tmp_path):
    """Unit vectors at 0° and 80° have their mean at 40°, as do those at 10°, 30° and 50° at 30°."""
    for video, angles in {"a/0": [0, 80], "a/1": [10, 30, 50], "b/0": [100]}.items():
        for frame, angle in enumerate(angles):
            save(tmp_path / "videos" / video / f"{frame}.png", angle)
    lines = ["split number, pair number, first name, second name, is same"]
    for fold in (1, 2):
        lines += [f"{fold}, 1, a/0, a/1, 1", f"{fold}, 2, a/1, b/0, 0"]
    (tmp_path / "splits.txt").write_text("\n".join(lines))
    protocol = read_protocol(tmp_path / "splits.txt", tmp_path / "videos")
    r = verify_pairs(ANGLES, protocol).result
    middle = (np.cos(np.deg2rad(10)) + np.cos(np.deg2rad(70))) / 2
    assert r.thresholds == pytest.approx(middle, abs=1e-6)
    assert r.accuracy == 1


def test_unreadable_images_raise_or_their_pairs_are_skipped(tmp_path):
    protocol = by_hand(tmp_path)
    bad = tmp_path / "faces" / "A3" / "A3_0002.png"
    bad.write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"A3_0002\.png: not an image .*--bad-images skip"):
        verify_pairs(ANGLES, protocol)
    with pytest.raises(ValueError, match="fold 4 has no pair of the same person"):
        verify_pairs(ANGLES, protocol, bad_images="skip")
    more = (tmp_path / "pairs.txt").read_text().replace("10\t1", "5\t2")
    lines = more.splitlines()
    lines[1:] = [
        line
        for at in range(1, 21, 4)
        for line in (lines[at], lines[at + 2], lines[at + 1], lines[at + 3])
    ]
    (tmp_path / "pairs.txt").write_text("\n".join(lines))
    protocol = read_protocol(tmp_path / "pairs.txt", tmp_path / "faces")
    for size in (1, 2, 64):
        results = verify_pairs(ANGLES, protocol, bad_images="skip", batch_size=size)
        assert len(results.protocol.pairs) == 19
        (only,) = results.document()["skipped"]
        assert only.startswith(f"line 7: {bad}: not an image")
        assert results.result.accuracy == pytest.approx(0.9)


def test_nonfinite_vectors_raise_with_the_file(tmp_path):
    def broken(pixels):
        vectors = ANGLES.embed(pixels)
        vectors[pixels[:, 0, 0, 0] == 70] = np.nan  # that of B1 … B9
        return vectors

    protocol = by_hand(tmp_path)
    with pytest.raises(
        ValueError, match=r"B\d_0001\.png\) has NaN or infinite values: its weights"
    ):
        verify_pairs(replace(ANGLES, embed=broken), protocol)


def test_verify_command(call, tmp_path):
    by_hand(tmp_path)
    rng = np.random.default_rng(0)
    for path in (tmp_path / "faces").rglob("*.png"):
        save(path, rng.integers(0, 256, 3))
    model = mean_color(tmp_path / "m.onnx")
    words = ["faces", "verify", model, tmp_path / "faces", tmp_path / "pairs.txt"]
    text = call(*words)
    assert "LFW: 20 pairs in 10 folds; cosine of image and mirror image, concatenated" in text
    words += ["--json", "--out", tmp_path / "x.json", "--roc", tmp_path / "roc.svg"]
    document = json.loads(call(*words))
    assert json.loads((tmp_path / "x.json").read_text()) == document
    assert f"accuracy {100 * document['accuracy']:.2f} ± " in text
    expected = verify_pairs(
        open_embedder(model), read_protocol(tmp_path / "pairs.txt", tmp_path / "faces")
    )
    assert document["accuracy"] == expected.result.accuracy
    assert b"<polyline" in (tmp_path / "roc.svg").read_bytes()


def test_verify_bin_set_equals_its_images(call, tmp_path):
    """The accuracy is that of NumPy, with insightface's folds."""
    protocol = by_hand(tmp_path)
    rng = np.random.default_rng(0)
    colors = {str(p): rng.integers(0, 256, 3) for p in (tmp_path / "faces").rglob("*.png")}
    for path, color in colors.items():
        save(Path(path), color)
    files = [protocol.templates[n][0] for p in protocol.pairs for n in (p.first, p.second)]
    same = [p.same for p in protocol.pairs]
    (tmp_path / "a.bin").write_bytes(pickle.dumps(([Path(f).read_bytes() for f in files], same)))
    model = mean_color(tmp_path / "m.onnx")
    document = json.loads(call("faces", "verify", model, tmp_path / "a.bin", "--json"))
    other = json.loads(
        call("faces", "verify", model, tmp_path / "faces", tmp_path / "pairs.txt", "--json")
    )
    assert document["protocol"] == "BIN"
    assert document["images"] == 40
    assert [fold["accuracy"] for fold in document["folds"]] == [
        f["accuracy"] for f in other["folds"]
    ]
    vectors = np.array([(colors[f] - 127.5) / 127.5 for f in files])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    scores, same = (vectors[::2] * vectors[1::2]).sum(1), np.array(same)
    for fold, rows in enumerate(np.split(np.arange(20), 10)):
        rest = np.delete(np.arange(20), rows)
        grid = np.append(np.sort(scores[rest]) - 1e-9, 2.0)
        best = max(((scores[rest] >= t) == same[rest]).mean() for t in grid)
        threshold = document["folds"][fold]["threshold"]
        threshold = -2 if threshold is None else threshold
        assert ((scores[rest] >= threshold) == same[rest]).mean() == best
    assert "a.bin: 20 pairs in 10 folds" in call("faces", "verify", model, tmp_path / "a.bin")


def halves(tmp_path):
    """Write images with different halves, and the mean color of the left half as ONNX model."""
    protocol = by_hand(tmp_path)
    rng = np.random.default_rng(0)
    for path in (tmp_path / "faces").rglob("*.png"):
        colors = rng.integers(0, 256, (2, 3)).repeat(4, 0)[None].repeat(8, 0).astype(np.uint8)
        Image.fromarray(colors).save(path)
    nodes = [
        helper.make_node("Slice", ["x", "start", "end", "axis"], ["left"]),
        helper.make_node("ReduceMean", ["left", "axes"], ["y"], keepdims=0),
    ]
    constants = {"start": [0], "end": [4], "axis": [3], "axes": [2, 3]}
    nodes = [
        *(helper.make_node("Constant", [], [k], value_ints=v) for k, v in constants.items()),
        *nodes,
    ]
    return protocol, mean_color(tmp_path / "left.onnx", nodes=nodes)


def colors_of(file):
    """Return the embeddings of an image and its mirror image."""
    pixels = (np.asarray(Image.open(file)) - 127.5) / 127.5
    return pixels[0, 0], pixels[0, -1]


@pytest.mark.parametrize("flip", ["concat", "sum", "none"])
def test_flip_equals_numpy(call, tmp_path, flip):
    protocol, model = halves(tmp_path)
    combine = {"concat": np.concatenate, "sum": np.sum, "none": lambda views, _: views[0]}[flip]
    vectors = {name: combine(colors_of(file), 0) for name, (file,) in protocol.templates.items()}
    same = np.array([pair.same for pair in protocol.pairs])
    scores = np.array(
        [
            np.dot(vectors[p.first], vectors[p.second])
            / np.linalg.norm(vectors[p.first])
            / np.linalg.norm(vectors[p.second])
            for p in protocol.pairs
        ]
    )
    words = ["faces", "verify", model, tmp_path / "faces", tmp_path / "pairs.txt", "--flip", flip]
    document = json.loads(call(*words, "--json"))
    # The probability that a same pair is more similar than a different one.
    expected = (scores[same][:, None] > scores[~same]).mean()
    assert document["auc"] == pytest.approx(expected)
    assert {"concat": "concatenated", "sum": "summed", "none": "only"}[flip] in document["views"]
    rank = json.loads(call("faces", "identify", *words[2:4], "--flip", flip, "--json"))["rank"]
    assert 0 <= rank["1"] <= 1


def by_color(pixels):
    """Return unit vectors whose angle is red in degrees, and green in fractions of it."""
    angle = torch.deg2rad(pixels[:, :2, 0, 0].double() @ torch.tensor([1, 1 / 256]).double())
    return torch.stack([angle.cos(), angle.sin()], 1).float()


def by_length(pixels):
    """Return the same vectors, with blue as their length."""
    return by_color(pixels) * pixels[:, 2, 0, :1].float()


@pytest.mark.parametrize("flip", ["concat", "sum", "none"])
def test_errors_versus_reject_equal_numpy(tmp_path, flip):
    """The quality of a pair is that of its shorter vector, before normalization."""
    rng = np.random.default_rng(0)
    lines, colors = ["10\t3"], {}
    for fold in range(10):
        for name in (f"{letter}{fold}" for letter in "ABC"):
            low = 0 if name[0] == "A" else 30
            people = rng.integers([low, 0, 50], [low + 60, 256, 256], (2, 3))
            lfw(tmp_path / "faces", {name: people})
            colors |= {f"{name}/{name}_000{i + 1}": color for i, color in enumerate(people)}
        lines += [f"{letter}{fold}\t1\t2" for letter in "ABC"]
        lines += [f"A{fold}\t{n}\tB{fold}\t1" for n in (1, 2)] + [f"B{fold}\t2\tC{fold}\t1"]
    (tmp_path / "pairs.txt").write_text("\n".join(lines))
    protocol = read_protocol(tmp_path / "pairs.txt", tmp_path / "faces")
    embedder = replace(ANGLES, embed=by_color, features=by_length)
    plain = verify_pairs(embedder, protocol, flip=flip, batch_size=7)
    result = verify_pairs(embedder, protocol, flip=flip, quality=True, batch_size=7)
    assert plain.result.fold_accuracies.tolist() == result.result.fold_accuracies.tolist()
    assert plain.result.auc == result.result.auc
    assert plain.reject is None
    sides = np.array([[colors[p.first], colors[p.second]] for p in protocol.pairs])
    scores = np.cos(np.deg2rad(np.diff(sides[:, :, :2] @ [1, 1 / 256], axis=1)[:, 0]))
    same = np.array([pair.same for pair in protocol.pairs])
    # FAR 0.1 of 30 different pairs: three are accepted.
    threshold = scores[scores > np.sort(scores[~same])[-4]].min()
    quality = sides[:, :, 2].min(1)
    curve = result.reject
    assert curve.far == 0.1
    assert len(curve.rejected) == 8
    for rejected, fnmr, fmr in zip(curve.rejected, curve.fnmr, curve.fmr, strict=True):
        kept = quality >= np.sort(quality)[round(rejected * 60)]
        assert kept.sum() == round(60 * (1 - rejected))
        assert fnmr == pytest.approx((scores[kept & same] < threshold).mean())
        assert fmr == pytest.approx((scores[kept & ~same] >= threshold).mean())
    assert "pairs rejected" in str(result)
    rows = result.document()["error_versus_reject"]
    assert [row["fnmr"] for row in rows] == curve.fnmr.tolist()


def test_quality_needs_unnormalized_vectors(call, tmp_path):
    protocol = by_hand(tmp_path)
    with pytest.raises(ValueError, match="all have length 1"):
        verify_pairs(ANGLES, protocol, quality=True)
    saved = Embedder.create("small_convnet", 8, weights="none", image_size=24).save(tmp_path / "e")
    words = ["faces", "verify", saved, tmp_path / "faces", tmp_path / "pairs.txt", "--quality"]
    document = json.loads(call(*words, "--json"))
    assert document["error_versus_reject"][0]["rejected"] == 0
    assert "FNMR" in call(*words)


@pytest.mark.parametrize("flip_tta", [False, True])
def test_verify_saved_embedder(call, tmp_path, flip_tta):
    by_hand(tmp_path)
    saved = Embedder.create("small_convnet", 8, weights="none", image_size=24, flip_tta=flip_tta)
    words = ["faces", "verify", saved.save(tmp_path / "e"), tmp_path / "faces"]
    document = json.loads(call(*words, tmp_path / "pairs.txt", "--json"))
    assert ("flip TTA" in document["views"]) == flip_tta
    assert document["pairs"] == 20
    words += [tmp_path / "pairs.txt", "--flip", "sum"]
    if flip_tta:
        assert "--flip sum has no effect" in call(*words, code=2)
        return
    # The sum of the vectors before L2 normalization, which `embed` applies.
    embedder = open_embedder(tmp_path / "e")
    pixels = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8)
    raw = embedder.features(pixels)
    assert torch.allclose(raw / raw.norm(dim=1, keepdim=True), embedder.embed(pixels), atol=1e-6)
    assert not torch.allclose(raw.norm(dim=1), torch.ones(2))
    assert "summed" in json.loads(call(*words, "--json"))["views"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.onnx", "faces", "pairs.txt"], "nothing.onnx"),
        (["m.onnx", "faces", "faces"], "no such list of pairs"),
        (["m.onnx", "pairs.txt"], "not a .bin verification set"),
        (["m.onnx", "faces"], "Pass"),
        (["m.onnx", "faces", "pairs.txt", "--roc", "x.pdf"], "--roc must end in .svg"),
        (["m.onnx", "faces", "pairs.txt", "--out", "x.csv"], "--out must end in .json"),
        (["m.onnx", "faces", "pairs.txt", "--input", '{"sise": 8}'], "did you mean 'size'"),
        (["m.onnx", "faces", "pairs.txt", "--device", "gpu"], "'gpu'"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_verify_usage_errors(call, tmp_path, monkeypatch, words, message):
    by_hand(tmp_path)
    mean_color(tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    assert message in call("faces", "verify", *words, code=2)
