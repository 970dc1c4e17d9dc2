"""Networks for vectors instead of images, before the head."""

from torch import Tensor, nn


class ResidualMLP(nn.Module):
    """x + MLP(LayerNorm(x)); the MLP starts at zero, so training starts with the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, 2 * dim)
        self.narrow = nn.Linear(2 * dim, dim)
        nn.init.zeros_(self.narrow.weight)
        nn.init.zeros_(self.narrow.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map vectors [B, dim] to vectors [B, dim]."""
        change: Tensor = self.narrow(nn.functional.gelu(self.widen(self.norm(x))))
        return x + change


def build_for_vectors(name: str, dim: int) -> nn.Module:
    """Create one of `VECTOR_BACKBONES`."""
    return nn.Identity() if name == "vectors" else ResidualMLP(dim)
