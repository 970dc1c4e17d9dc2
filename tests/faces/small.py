"""Small faces with known vectors: a gray level is an angle; an ONNX file is the mean color."""

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from PIL import Image

from proximetry.faces import FaceEmbedder
from proximetry.models import Preprocessing

PLAIN = Preprocessing(resize=8, crop=(8, 8), mean=(0.0,) * 3, std=(1.0,) * 3, scale=1.0)


def save(path, value):
    """Write an image of one gray level or color."""
    path.parent.mkdir(parents=True, exist_ok=True)
    color = (value,) * 3 if np.isscalar(value) else tuple(value)
    Image.new("RGB", (8, 8), tuple(map(int, color))).save(path)


def by_angle(pixels):
    """Return unit vectors at the angle, in degrees, of the gray level."""
    angle = torch.deg2rad(pixels[:, 0, 0, 0].double())
    return torch.stack([angle.cos(), angle.sin()], 1).float()


ANGLES = FaceEmbedder("angles", 2, PLAIN, by_angle, torch.device("cpu"))


def mean_color(path, *, batch="batch", shape=(3, 8, 8), dtype=TensorProto.FLOAT, nodes=None, **io):
    """Write a network whose embedding is the mean over the pixels."""
    inputs = io.get("inputs", [helper.make_tensor_value_info("x", dtype, [batch, *shape])])
    outputs = io.get("outputs", [helper.make_tensor_value_info("y", dtype, [batch, 3])])
    nodes = nodes or [
        helper.make_node("GlobalAveragePool", ["x"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "mean", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, path)
    return path


def lfw(root, people):
    """Write people, {name: values of their images}, in LFW's layout."""
    for name, values in people.items():
        for number, value in enumerate(values, start=1):
            save(root / name / f"{name}_{number:04d}.png", value)
    return root
