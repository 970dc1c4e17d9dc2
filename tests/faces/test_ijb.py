"""IJB-B and IJB-C: templates against NumPy, damaged lists, the command."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from proximetry.faces import FaceEmbedder, read_ijb, similarity, template, verify_templates, warp
from proximetry.models import Preprocessing
from tests.faces.small import mean_color

FACES = Preprocessing(resize=112, crop=(112, 112), mean=(0.0,) * 3, std=(1.0,) * 3, scale=1.0)
POINTS = template("112x112") / 3 + 4
# Template, media of each image; two templates share the number of a media.
ROWS = [(7, 1), (7, 1), (7, 2), (7, 1), (3, 1), (3, 5), (3, 5), (9, 8), (12, 4), (12, 4), (30, 6)]


def corners(pixels):
    """Return vectors of different lengths that depend on the alignment and on the side."""
    return pixels[:, :, ::37, ::41].double().flatten(1).float() - 100


EMBEDDER = FaceEmbedder("corners", 3 * 4 * 3, FACES, corners, torch.device("cpu"))


@pytest.fixture
def folder(tmp_path):
    return write_ijb(tmp_path)


def write_ijb(tmp_path):
    """Write a small IJB-C: every pair of templates, and points that differ between the images."""
    rng = np.random.default_rng(0)
    meta, images = tmp_path / "IJBC" / "meta", tmp_path / "IJBC" / "loose_crop"
    meta.mkdir(parents=True)
    images.mkdir()
    points = POINTS + rng.normal(0, 1, (len(ROWS), 5, 2))
    for number in range(len(ROWS)):
        pixels = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((48, 48)).save(images / f"{number}.png")
    lines = [f"{n}.png {t} {m}\n\n" for n, (t, m) in enumerate(ROWS)]
    (meta / "ijbc_face_tid_mid.txt").write_text("".join(lines))
    scores = 0.5 + rng.random(len(ROWS)) / 2
    lines = [
        f"{n}.png {' '.join(map(str, p.ravel()))} {s} \n"
        for n, (p, s) in enumerate(zip(points, scores, strict=True))
    ]
    (meta / "ijbc_name_5pts_score.txt").write_text("".join(lines))
    ids = sorted({t for t, _ in ROWS})
    lines = [f"{a} {b} {int((a + b) % 3 == 1)}\n" for a in ids for b in ids if a < b]
    (meta / "ijbc_template_pair_label.txt").write_text("".join(lines))
    return tmp_path / "IJBC"


def reference(folder, flip, unreadable=()):
    """Return the similarities of all pairs in descending order, by plain loops."""
    lines = (folder / "meta" / "ijbc_name_5pts_score.txt").read_text().splitlines()
    features = {}
    for n, line in enumerate(lines):
        name, *values = line.split()
        if n in unreadable:
            continue
        *points, score = map(float, values)
        image = np.asarray(Image.open(folder / "loose_crop" / name))
        matrix = similarity(np.reshape(points, (5, 2)), template("112x112"))
        face = torch.from_numpy(warp(image, matrix, 112, 112)).permute(2, 0, 1)[None]
        views = [corners(face).numpy()[0], corners(face.flip(3)).numpy()[0]]
        combine = {"sum": np.sum, "concat": np.concatenate, "none": lambda v, _: v[0]}[flip]
        features[n] = combine(views, 0).astype(float) * score
    vectors = {}
    for tid in {t for t, _ in ROWS}:
        total = 0
        for media in {m for t, m in ROWS if t == tid}:
            members = [
                features[n] for n, row in enumerate(ROWS) if row == (tid, media) and n in features
            ]
            total = total + (np.mean(members, 0) if members else 0)
        vectors[tid] = total / np.linalg.norm(total) if np.any(total) else None
    pairs = np.loadtxt(folder / "meta" / "ijbc_template_pair_label.txt", int)
    scores = [
        (float(vectors[a] @ vectors[b]), label)
        for a, b, label in pairs
        if vectors[a] is not None and vectors[b] is not None
    ]
    return sorted(scores, reverse=True)


@pytest.mark.parametrize("flip", [None, "sum", "concat", "none"])
def test_templates_equal_numpy(folder, flip):
    protocol = read_ijb(folder)
    assert (protocol.title, len(protocol.files)) == ("IJB-C", 11)
    result = verify_templates(EMBEDDER, protocol, flip=flip, batch_size=4).result
    expected = reference(folder, flip or "sum")
    scores, labels = np.array(expected).T
    assert result.roc.thresholds[1:] == pytest.approx(scores, abs=1e-6)
    assert result.roc.tar[1:] == pytest.approx(np.cumsum(labels) / labels.sum())
    allowed = int(0.1 * (labels == 0).sum())
    assert set(result.tar_at_far) == ({0.1} if allowed else set())
    assert result.unmeasurable_far[-3:] == (1e-4, 1e-5, 1e-6)


def test_unreadable_images_raise_or_are_skipped(folder):
    """The mean of a media is over its readable images; templates without any are skipped."""
    (folder / "loose_crop" / "1.png").unlink()
    (folder / "loose_crop" / "7.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"1 of 11 images do not exist .* 1\.png"):
        read_ijb(folder)
    protocol = read_ijb(folder, "skip")
    with pytest.raises(ValueError, match="--bad-images skip"):
        verify_templates(EMBEDDER, protocol)
    results = verify_templates(EMBEDDER, protocol, bad_images="skip", batch_size=3)
    scores, _ = np.array(reference(folder, "sum", {1, 7})).T
    assert results.result.roc.thresholds[1:] == pytest.approx(scores, abs=1e-6)
    assert len(scores) == 6
    skipped = results.document()["skipped"]
    assert "1.png: no such file" in skipped[0]
    assert skipped[2:] == ["template 9: no readable image"]


def test_coinciding_points(folder):
    path = folder / "meta" / "ijbc_name_5pts_score.txt"
    lines = path.read_text().splitlines()
    lines[2] = "2.png" + " 3" * 10 + " 0.5"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"2\.png: its five points coincide"):
        verify_templates(EMBEDDER, read_ijb(folder))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("face_tid_mid", "", "is empty"),
        ("face_tid_mid", "0.png 1\n", "line 1: expected an image and 2 numbers"),
        ("face_tid_mid", "0.png 1 2\n1.png 1 x\n", "line 2: could not convert"),
        ("face_tid_mid", "0.png 1 2\n", "list different images"),
        ("name_5pts_score", "0.png" + " 1" * 10, "line 1: expected an image and 11 numbers"),
        ("name_5pts_score", "0.png" + " nan" * 11, "line 1: expected an image and 11 numbers"),
        ("template_pair_label", "", "two templates and a label"),
        ("template_pair_label", "7 3\n", "two templates and a label"),
        ("template_pair_label", "7 3 1\n7 3\n", "columns changed"),
        ("template_pair_label", "7 3 x\n", "could not convert"),
        ("template_pair_label", "7 3 2\n", "labels must be 0 or 1"),
        ("template_pair_label", "7 4 1\n99 3 0\n", "without images: 4, 99"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_damaged_lists(folder, name, text, message):
    path = folder / "meta" / f"ijbc_{name}.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_ijb(folder)
    assert str(path) in str(caught.value)


def test_ijb_command(call, folder):
    model = mean_color(folder / "m.onnx", shape=(3, 112, 112))
    words = ["faces", "verify", model, folder]
    text = call(*words)
    assert "IJB-C: 10 pairs of 5 templates with 11 images; cosine of image and mirror" in text
    document = json.loads(call(*words, "--json", "--roc", folder / "roc.svg"))
    assert (document["protocol"], document["templates"], document["pairs"]) == ("IJB-C", 5, 10)
    assert b"<polyline" in (folder / "roc.svg").read_bytes()
    (folder / "meta" / "ijbc_name_5pts_score.txt").unlink()
    assert "no such file" in call(*words, code=2)
    (folder / "meta" / "ijbc_face_tid_mid.txt").unlink()
    assert "Pass a list of pairs" in call(*words, code=2)


def test_long_roc_curves_are_thinned(tmp_path):
    from proximetry.faces.verify import MAX_POINTS, draw_roc
    from proximetry.metrics import verification_rates

    rng = np.random.default_rng(0)
    same = rng.random(200_000) < 0.5
    draw_roc(verification_rates(rng.normal(size=200_000) + same, same), "x", tmp_path / "roc.svg")
    assert (tmp_path / "roc.svg").stat().st_size < 60 * MAX_POINTS
