"""Inception with batch normalization (Ioffe & Szegedy 2015), the backbone of the proxy papers.

Layer names are those of the Caffe network, so that it can load the common ImageNet checkpoint
`bn_inception-52deb4733.pth`. Input: BGR pixels 0…255 minus (104, 117, 128).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from proximetry.models.backbones import Backbone


class _Block(NamedTuple):
    """Channels of an inception block; blocks without a 1×1 branch have stride 2."""

    name: str
    one: int  # 1×1 branch; 0 = none
    three: tuple[int, int]  # reduce, 3×3
    double: tuple[int, int]  # reduce, then two 3×3
    pool: str
    projection: int  # 1×1 after the pool; 0 = the pooled input itself


_BLOCKS = (
    _Block("3a", 64, (64, 64), (64, 96), "avg", 32),
    _Block("3b", 64, (64, 96), (64, 96), "avg", 64),
    _Block("3c", 0, (128, 160), (64, 96), "max", 0),
    _Block("4a", 224, (64, 96), (96, 128), "avg", 128),
    _Block("4b", 192, (96, 128), (96, 128), "avg", 128),
    _Block("4c", 160, (128, 160), (128, 160), "avg", 128),
    _Block("4d", 96, (128, 192), (160, 192), "avg", 128),
    _Block("4e", 0, (128, 192), (192, 256), "max", 0),
    _Block("5a", 352, (192, 320), (160, 224), "avg", 128),
    _Block("5b", 352, (192, 320), (192, 224), "max", 128),
)


class BNInception(
    Backbone,
    name="bn_inception",
    channels="BGR",
    scale=1.0,
    mean=(104.0, 117.0, 128.0),
    std=(1.0,) * 3,
    crop_pct=0.875,
    classifier="last_linear",
):
    """11 million parameters, 1024 features, a feature map of 1/32 of the image sides.

    Sides must be multiples of 32 (224, 256, …), or be rounded to one by the layers (227).
    """

    num_features = 1024

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self._conv("conv1_7x7_s2", 3, 64, 7, stride=2)
        self._conv("conv2_3x3_reduce", 64, 64, 1)
        self._conv("conv2_3x3", 64, 192, 3)
        channels = 192
        for block in _BLOCKS:
            channels = self._block(block, channels)
        self.relu = nn.ReLU(inplace=True)
        self.shrink = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.max = nn.MaxPool2d(3, 1, 1, ceil_mode=True)
        self.avg = nn.AvgPool2d(3, 1, 1, ceil_mode=True)
        self.last_linear = nn.Linear(channels, num_classes) if num_classes else nn.Identity()

    def _conv(self, name: str, inputs: int, outputs: int, kernel: int, stride: int = 1) -> int:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        self.add_module(name, conv)
        self.add_module(f"{name}_bn", nn.BatchNorm2d(outputs))
        return outputs

    def _block(self, block: _Block, inputs: int) -> int:
        prefix, stride = f"inception_{block.name}_", 1 if block.one else 2
        outputs = 0
        if block.one:
            outputs += self._conv(f"{prefix}1x1", inputs, block.one, 1)
        reduced = self._conv(f"{prefix}3x3_reduce", inputs, block.three[0], 1)
        outputs += self._conv(f"{prefix}3x3", reduced, block.three[1], 3, stride)
        reduced = self._conv(f"{prefix}double_3x3_reduce", inputs, block.double[0], 1)
        middle = self._conv(f"{prefix}double_3x3_1", reduced, block.double[1], 3)
        outputs += self._conv(f"{prefix}double_3x3_2", middle, block.double[1], 3, stride)
        if block.projection:
            return outputs + self._conv(f"{prefix}pool_proj", inputs, block.projection, 1)
        return outputs + inputs

    def _run(self, name: str, x: Tensor) -> Tensor:
        return self.relu(getattr(self, f"{name}_bn")(getattr(self, name)(x)))  # type: ignore[no-any-return]

    def _run_block(self, block: _Block, x: Tensor) -> Tensor:
        prefix = f"inception_{block.name}_"
        parts = [self._run(f"{prefix}1x1", x)] if block.one else []
        parts.append(self._run(f"{prefix}3x3", self._run(f"{prefix}3x3_reduce", x)))
        double = x
        for step in ("reduce", "1", "2"):
            double = self._run(f"{prefix}double_3x3_{step}", double)
        parts.append(double)
        if block.projection:
            parts.append(self._run(f"{prefix}pool_proj", getattr(self, block.pool)(x)))
        else:
            parts.append(self.shrink(x))
        return torch.cat(parts, 1)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map, [B, 1024, H / 32, W / 32]."""
        x = self.shrink(self._run("conv1_7x7_s2", x))
        x = self.shrink(self._run("conv2_3x3", self._run("conv2_3x3_reduce", x)))
        for block in _BLOCKS:
            x = self._run_block(block, x)
        return x
