"""The 20-layer network of SphereFace (Liu et al. 2017): PReLU, no batch norm, 112×96 faces.

Layers are named as in the published Caffe network (conv1_1, relu1_1, …). Its last layer,
linear from the flattened map to 512 dimensions, is the head of the embedder.
"""

from torch import Tensor, nn

from proximetry.models.backbones import Backbone

# Channels and residual blocks of the four stages; each stage starts with a stride-2 convolution.
_STAGES = ((64, 1), (128, 2), (256, 4), (512, 1))


class SphereFace20(
    Backbone,
    name="sphereface20",
    pooling="flatten",
    scale=1.0,
    mean=(127.5,) * 3,
    std=(128.0,) * 3,
    input_size=(3, 112, 96),
    classifier="fc6",
):
    """20 convolutions; the feature map of a 112×96 face is 512×7×6."""

    num_features = 512

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        inputs = 3
        for stage, (channels, blocks) in enumerate(_STAGES, 1):
            for layer in range(1, 2 * blocks + 2):
                conv = nn.Conv2d(inputs, channels, 3, 2 if layer == 1 else 1, 1)
                if layer == 1:
                    nn.init.xavier_uniform_(conv.weight)
                else:
                    # Without batch norm, residual branches must start near zero.
                    nn.init.normal_(conv.weight, std=0.01)
                nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
                self.add_module(f"conv{stage}_{layer}", conv)
                self.add_module(f"relu{stage}_{layer}", nn.PReLU(channels))
                inputs = channels
        self.fc6 = nn.Linear(512, num_classes) if num_classes else nn.Identity()

    def _run(self, stage: int, layer: int, x: Tensor) -> Tensor:
        convolved = getattr(self, f"conv{stage}_{layer}")(x)
        return getattr(self, f"relu{stage}_{layer}")(convolved)  # type: ignore[no-any-return]

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map, [B, 512, H / 16, W / 16]."""
        for stage, (_, blocks) in enumerate(_STAGES, 1):
            x = self._run(stage, 1, x)
            for block in range(blocks):
                inner = self._run(stage, 2 * block + 2, x)
                x = x + self._run(stage, 2 * block + 3, inner)
        return x
