"""ONNX files as embedders: the pixels that go in, batches of any kind, and files that are none."""

import json
import re

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
def test_pixels_go_in_as_stated(tmp_path, contract, expected):
    path = mean_color(tmp_path / "m.onnx")
    places = [json.dumps(contract), str(tmp_path / "c.json"), None]
    (tmp_path / "c.json").write_text(json.dumps(contract))
    (tmp_path / "m.json").write_text(json.dumps(contract))
    for place in places:
        found = open_embedder(path, place).embed(PIXELS)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_size_is_that_of_the_file_or_as_stated(tmp_path):
    fixed = open_embedder(mean_color(tmp_path / "m.onnx", shape=(3, 12, 8)))
    assert fixed.preprocessing.crop == (12, 8)
    free = mean_color(tmp_path / "free.onnx", shape=(3, "h", "w"))
    assert open_embedder(free).preprocessing.crop == (112, 112)
    assert open_embedder(free, '{"size": 64}').preprocessing.crop == (64, 64)
    aligned = open_embedder(free, '{"size": [112, 96]}')
    image = Image.effect_noise((96, 112), 50).convert("RGB")
    pixels = aligned.preprocessing.pixels(image)
    assert np.array_equal(pixels.permute(1, 2, 0), np.asarray(image)), "aligned faces stay"


@pytest.mark.parametrize("batch", ["batch", 1, 2, 3, 8])
def test_batches_of_any_kind(tmp_path, batch):
    found = open_embedder(mean_color(tmp_path / "m.onnx", batch=batch), '{"mean": 0, "std": 1}')
    np.testing.assert_allclose(found.embed(PIXELS), MEAN, rtol=1e-5)
    assert found.dim == 3


def test_a_file_that_promises_any_batch_and_means_one(tmp_path):
    shape = helper.make_node(
        "Constant", [], ["s"], value=helper.make_tensor("s", TensorProto.INT64, [2], [1, -1])
    )
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["p"]),
        shape,
        helper.make_node("Reshape", ["p", "s"], ["y"]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3])]
    path = mean_color(tmp_path / "m.onnx", nodes=nodes, outputs=outputs)
    found = open_embedder(path, '{"mean": 0, "std": 1}').embed(PIXELS)
    np.testing.assert_allclose(found, MEAN, rtol=1e-5)


def test_half_precision(tmp_path):
    path = mean_color(tmp_path / "m.onnx", dtype=TensorProto.FLOAT16)
    found = open_embedder(path).embed(PIXELS)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, (MEAN - 127.5) / 127.5, atol=3e-3)


def test_of_several_outputs_one_is_named(tmp_path):
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
        helper.make_node("Neg", ["y"], ["z"]),
    ]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 3]) for n in "zy"]
    path = mean_color(tmp_path / "m.onnx", nodes=nodes, outputs=outputs)
    with pytest.raises(ValueError, match="several outputs, z, y: say which is the embedding"):
        open_embedder(path)
    with pytest.raises(ValueError, match="no output 'x', but z, y"):
        open_embedder(path, '{"output": "x"}')
    found = open_embedder(path, '{"output": "y", "mean": 0, "std": 1}').embed(PIXELS)
    np.testing.assert_allclose(found, MEAN, rtol=1e-5)


def info(name, shape, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"inputs": [info("x", ["b", 3, 8, 8]), info("w", [1])]},
            "has 2 inputs (x ['b', 3, 8, 8],",
        ),
        (
            {"inputs": [info("x", ["b", 8, 8, 3])], "outputs": [info("y", ["b", 8])]},
            "expected images [batch, 3, height, width]",
        ),
        (
            {
                "inputs": [info("x", ["b", 512])],
                "nodes": [helper.make_node("Identity", ["x"], ["y"])],
                "outputs": [info("y", ["b", 512])],
            },
            "takes x ['b', 512]; expected images",
        ),
        (
            {
                "nodes": [helper.make_node("GlobalAveragePool", ["x"], ["y"])],
                "outputs": [info("y", ["batch", 3, 1, 1])],
            },
            "into vectors [batch, dimensions]: it gives [1, 3, 1, 1] of float32",
        ),
        (
            {
                "inputs": [info("x", ["b", 3, 8, 8], TensorProto.INT64)],
                "nodes": [helper.make_node("Flatten", ["x"], ["y"])],
                "outputs": [info("y", ["b", 192], TensorProto.INT64)],
            },
            "takes tensor(int64); expected tensor(float)",
        ),
    ],
    ids=["inputs", "layout", "rank", "output", "type"],
)
def test_networks_that_are_no_embedders(tmp_path, options, message):
    path = mean_color(tmp_path / "m.onnx", **options)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        open_embedder(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        ('{"size": 9}', "takes 8×8 pixels (height×width), but --input says 9×9"),
        ('{"size": "8"}', "size must be a side or [height, width], got '8'"),
        ('{"size": [8, 0]}', "size must be a side or [height, width]"),
        ('{"channels": "GRB"}', "--input: channels must be 'RGB' or 'BGR', got 'GRB'"),
        ('{"range": [1, 0]}', "range must be two rising numbers"),
        ('{"mean": [1, 2]}', "mean must be a number or three, got [1, 2]"),
        ('{"std": 0}', "must be positive"),
        ('{"colour": 1}', "--input: unknown key 'colour'"),
        ("{8}", "--input is not JSON"),
        ("nothing.json", "nothing.json cannot be read: No such file"),
    ],
)
def test_contracts_that_cannot_be(tmp_path, contract, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        open_embedder(mean_color(tmp_path / "m.onnx"), contract)


def test_a_contract_is_for_onnx_files_alone(tmp_path):
    saved = Embedder.create("small_convnet", 8, weights="none", image_size=24).save(tmp_path / "e")
    with pytest.raises(ValueError, match="--input describes an ONNX file"):
        open_embedder(saved, "{}")
    (tmp_path / "m.onnx").write_bytes(b"\x08\x08nonsense")
    with pytest.raises(ValueError, match="is no ONNX file that onnxruntime reads"):
        open_embedder(tmp_path / "m.onnx")
    mean_color(tmp_path / "m.onnx")
    (tmp_path / "m.json").write_text("[8]")
    with pytest.raises(ValueError, match="must be a JSON object"):
        open_embedder(tmp_path / "m.onnx")
