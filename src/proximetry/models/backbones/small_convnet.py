"""A small convolutional network for small images (32 to 64 pixels), trained from scratch."""

from torch import Tensor, nn

from proximetry.models.backbones import Backbone

# Channels and stride of each 3×3 convolution. Another stride of 2 makes results on glyphs worse.
_LAYERS = ((32, 2), (64, 1), (96, 2), (128, 1))


class SmallConvNet(
    Backbone,
    name="small_convnet",
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    input_size=(3, 48, 48),
    classifier="classifier",
):
    """Four times convolution, batch norm, ReLU: 186 thousand parameters, a map of side / 4."""

    num_features = _LAYERS[-1][0]

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for channels, stride in _LAYERS:
            conv = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
            layers += [conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            inputs = channels
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, num_classes) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map."""
        return self.layers(x)  # type: ignore[no-any-return]
