"""ONNX files as embedders: input pixels, batch sizes, invalid files."""

import json

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from PIL import Image

from proximetry.faces import open_embedder
from proximetry.models import Embedder
from tests.faces.small import mean_color

PIXELS = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.manual_seed(0))
MEAN = PIXELS.double().mean((2, 3)).numpy()


POOL = helper.make_node("GlobalAveragePool", ["x"], ["p"])


@pytest.mark.parametrize(
    ("contract", "expected"),
    [
        ({}, (MEAN - 127.5) / 127.5),
        ({"channels": "BGR", "mean": 0, "std": 1}, MEAN[:, ::-1]),
        ({"range": [0, 1]}, (MEAN / 255 - 0.5) / 0.5),
        ({"range": [-1, 1]}, MEAN / 127.5 - 1),
        ({"range": [-1, 1], "mean": 0.5, "std": 2}, (MEAN / 127.5 - 1.5) / 2),
        ({"std": 128}, (MEAN - 127.5) / 128),
        (
            {"range": [0, 1], "mean": [0.485, 0.456, 0.406], "std": [0.2, 0.3, 0.4]},
            (MEAN / 255 - [0.485, 0.456, 0.406]) / [0.2, 0.3, 0.4],
        ),
    ],
    ids=str,
)
def test_contract_defines_the_input_pixels(tmp_path, contract, expected):
    path = mean_color(tmp_path / "m.onnx")
    places = [json.dumps(contract), str(tmp_path / "c.json"), None]
    (tmp_path / "c.json").write_text(json.dumps(contract))
    (tmp_path / "m.json").write_text(json.dumps(contract))
    for place in places:
        vectors = open_embedder(path, place).embed(PIXELS)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_image_size_of_the_file_or_contract(tmp_path):
    fixed = open_embedder(mean_color(tmp_path / "m.onnx", shape=(3, 12, 8)))
    assert fixed.preprocessing.crop == (12, 8)
    free = mean_color(tmp_path / "free.onnx", shape=(3, "h", "w"))
    assert open_embedder(free).preprocessing.crop == (112, 112)
    assert open_embedder(free, '{"size": 64}').preprocessing.crop == (64, 64)
    aligned = open_embedder(free, '{"size": [112, 96]}')
    image = Image.effect_noise((96, 112), 50).convert("RGB")
    pixels = aligned.preprocessing.pixels(image)
    assert np.array_equal(pixels.permute(1, 2, 0), np.asarray(image)), "aligned faces stay"


@pytest.mark.parametrize("batch", ["batch", 1, 3, 8])
def test_fixed_and_dynamic_batch_sizes(tmp_path, batch):
    embedder = open_embedder(mean_color(tmp_path / "m.onnx", batch=batch), '{"mean": 0, "std": 1}')
    np.testing.assert_allclose(embedder.embed(PIXELS), MEAN, rtol=1e-5)
    assert embedder.dim == 3


def test_file_that_declares_any_batch_but_takes_one(tmp_path):
    shape = helper.make_node(
        "Constant", [], ["s"], value=helper.make_tensor("s", TensorProto.INT64, [2], [1, -1])
    )
    nodes = [POOL, shape, helper.make_node("Reshape", ["p", "s"], ["y"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3])]
    path = mean_color(tmp_path / "m.onnx", nodes=nodes, outputs=outputs)
    vectors = open_embedder(path, '{"mean": 0, "std": 1}').embed(PIXELS)
    np.testing.assert_allclose(vectors, MEAN, rtol=1e-5)


def test_half_precision(tmp_path):
    path = mean_color(tmp_path / "m.onnx", dtype=TensorProto.FLOAT16)
    vectors = open_embedder(path).embed(PIXELS)
    assert vectors.dtype == torch.float32
    np.testing.assert_allclose(vectors, (MEAN - 127.5) / 127.5, atol=3e-3)


def test_several_outputs_need_a_name(tmp_path):
    flat = helper.make_node("Flatten", ["p"], ["y"])
    nodes = [POOL, flat, helper.make_node("Neg", ["y"], ["z"])]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 3]) for n in "zy"]
    path = mean_color(tmp_path / "m.onnx", nodes=nodes, outputs=outputs)
    with pytest.raises(ValueError, match="z, y"):
        open_embedder(path)
    with pytest.raises(ValueError, match="z, y, not x"):
        open_embedder(path, '{"output": "x"}')
    vectors = open_embedder(path, '{"output": "y", "mean": 0, "std": 1}').embed(PIXELS)
    np.testing.assert_allclose(vectors, MEAN, rtol=1e-5)


def info(name, shape, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": [info("x", ["b", 3, 8, 8]), info("w", [1])]}, r"w \[1\]"),
        (
            {"inputs": [info("x", ["b", 8, 8, 3])], "outputs": [info("y", ["b", 8])]},
            r"\[b, 8, 8, 3\]",
        ),
        (
            {"nodes": [POOL], "outputs": [info("p", ["batch", 3, 1, 1])]},
            r"returns \[1, 3, 1, 1\]",
        ),
        (
            {
                "inputs": [info("x", ["b", 3, 8, 8], TensorProto.INT64)],
                "nodes": [helper.make_node("Flatten", ["x"], ["y"])],
                "outputs": [info("y", ["b", 192], TensorProto.INT64)],
            },
            r"tensor\(int64\)",
        ),
    ],
    ids=["inputs", "layout", "output", "type"],
)
def test_other_networks_raise(tmp_path, options, message):
    path = mean_color(tmp_path / "m.onnx", **options)
    with pytest.raises(ValueError, match=message) as caught:
        open_embedder(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        ('{"size": 9}', r"3, 9, 9\].* Expected: 8"),
        ('{"size": "8"}', "size .* '8'"),
        ('{"size": [8, 0]}', r"crop .*\(8, 0\)|resize .* 0"),
        ('{"channels": "GRB"}', "'GRB'"),
        ('{"range": [1, 0]}', "range"),
        ('{"mean": [1, 2]}', r"mean .*\[1, 2\]"),
        ('{"std": 0}', "std"),
        ('{"shade": 1}', "'shade'"),
        ("{8}", "description: Invalid JSON"),
        ("nothing.json", r"nothing\.json"),
    ],
)
def test_invalid_contracts_raise(tmp_path, contract, message):
    with pytest.raises(ValueError, match=message):
        open_embedder(mean_color(tmp_path / "m.onnx"), contract)


def test_contract_is_for_onnx_files_only(tmp_path):
    saved = Embedder.create("small_convnet", 8, weights="none", image_size=24).save(tmp_path / "e")
    with pytest.raises(ValueError, match="--input"):
        open_embedder(saved, "{}")
    (tmp_path / "m.onnx").write_bytes(b"\x08\x08nonsense")
    with pytest.raises(ValueError, match="not an ONNX file"):
        open_embedder(tmp_path / "m.onnx")
    mean_color(tmp_path / "m.onnx")
    (tmp_path / "m.json").write_text("[8]")
    with pytest.raises(ValueError, match="must be an object"):
        open_embedder(tmp_path / "m.onnx")
