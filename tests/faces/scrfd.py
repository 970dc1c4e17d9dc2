"""A small ONNX model with the inputs and outputs of SCRFD, and images with faces for it.

It reads one pixel in each cell of 8, 16 or 32 pixels: red is the score, green and blue stretch box
and points. The expected detections can therefore be computed by hand.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

STRIDES = (8, 16, 32)
# Offsets of the points from an anchor, in strides: upright, as in the templates.
POINTS = np.array([(-1.5, -1.0), (1.5, -1.0), (0.0, 0.5), (-1.2, 2.0), (1.2, 2.0)])


def weights(stride):
    """Return matrix [3, 30] and bias [30] from a pixel to (score, box, points) of two anchors."""
    matrix, bias = np.zeros((3, 2, 15)), np.zeros((2, 15))
    # Red 0…255 is the score 0…1, slightly less for some anchors: no two give the same score.
    factor = np.array([1.0, 0.913]) * {8: 1.0, 16: 0.971, 32: 0.947}[stride]
    matrix[0, :, 0] = 128 / 255 * factor
    bias[:, 0] = 0.5 * factor
    matrix[1, :, 1:5] = 0.5
    bias[:, 1:5] = [(2.5, 2.0, 2.5, 3.0), (3.0, 2.5, 3.0, 3.5)]
    matrix[2, :, 5:] = 0.2 * POINTS.ravel()
    bias[:, 5:] = POINTS.ravel()
    return matrix.reshape(3, 30).astype(np.float32), bias.reshape(30).astype(np.float32)


def make_detector(path, *, batch="N", size=("H", "W"), flat=False, rows=(1, 4, 10), order=None):
    """Write the model; with `flat` the outputs of one image are [anchors, …], as in insightface."""
    constants = {
        "rows": np.array([-1, 15] if flat else [0, -1, 15]),
        "start": np.array([0, 0]),
        "end": np.array([2**31, 2**31]),
        "axes": np.array([2, 3]),
        "last": np.array([-1]),
    }
    constants |= {f"step{s}": np.array([s, s]) for s in STRIDES}
    constants |= {f"matrix{s}": weights(s)[0] for s in STRIDES}
    constants |= {f"bias{s}": weights(s)[1] for s in STRIDES}
    constants |= {f"cut{k}": np.array([k]) for k in (0, 1, 5, 15)}
    nodes, outputs = [], []
    for s in STRIDES:
        nodes += [
            helper.make_node("Slice", ["image", "start", "end", "axes", f"step{s}"], [f"cell{s}"]),
            helper.make_node("Transpose", [f"cell{s}"], [f"hwc{s}"], perm=[0, 2, 3, 1]),
            helper.make_node("MatMul", [f"hwc{s}", f"matrix{s}"], [f"product{s}"]),
            helper.make_node("Add", [f"product{s}", f"bias{s}"], [f"sum{s}"]),
            helper.make_node("Reshape", [f"sum{s}", "rows"], [f"all{s}"]),
        ]
    for kind, (low, high) in {1: (0, 1), 4: (1, 5), 10: (5, 15)}.items():
        for s in STRIDES if kind in rows else ():
            name = f"out{kind}_{s}"
            words = [f"all{s}", f"cut{low}", f"cut{high}", "last"]
            nodes.append(helper.make_node("Slice", words, [name]))
            shape = [None, kind] if flat else [None, None, kind]
            outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 3, *size])
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    outputs = [outputs[k] for k in order] if order else outputs
    return save(path, helper.make_graph(nodes, "scrfd", [image], outputs, tensors))


def save(path, graph):
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def draw_image(height=100, width=120, faces=((56, 40),), seed=0):
    """Draw a dark, textured image; a face is a red spot at (x, y).

    Both are multiples of 8, but not both of 16, so that only the anchors of one cell detect it.
    """
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(20, 100, (6, 8, 3), dtype=np.uint8))
    image = np.array(coarse.resize((width, height), Image.Resampling.BICUBIC))
    for number, (x, y) in enumerate(faces):
        image[y - 2 : y + 6, x - 2 : x + 6] = (250 - number, 90 + 40 * number, 120)
    return image
