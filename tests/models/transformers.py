"""A small transformer of today; importing this registers it with timm as tiny_dinov3."""

import timm
from timm.models import register_model
from timm.models.eva import vit_tiny_patch16_dinov3_qkvb

# timm's register_model reads this.
default_cfgs = {"tiny_dinov3": timm.get_pretrained_cfg("vit_tiny_patch16_dinov3_qkvb").to_dict()}


@register_model
def tiny_dinov3(pretrained=False, **settings):
    """timm's DINOv3 with one block: registers, RoPE, biases that bypass the layers."""
    return vit_tiny_patch16_dinov3_qkvb(depth=1, embed_dim=32, num_heads=2, **settings)
