"""Vision transformers: cls-avg pooling, patch sizes, positions, layer groups, LoRA."""

import sys

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from proximetry.losses import ProxyAnchor, parameter_groups
from proximetry.models import Embedder
from proximetry.models.backbones import build, check_patches, class_and_patches
from proximetry.models.lora import add_lora, merge_lora, merged_copy
from tests.models import transformers  # noqa: F401 (importing registers tiny_dinov3)


def made(backbone, **settings):
    torch.manual_seed(0)
    return Embedder.create(backbone, 8, **{"weights": "none", "image_size": 32} | settings)


def images(count=3):
    draw = np.random.default_rng(0)
    return [draw.integers(0, 256, (40, 50, 3), dtype=np.uint8) for _ in range(count)]


@pytest.mark.parametrize(("backbone", "prefix"), [("test_vit", 1), ("tiny_dinov3", 5)])
def test_cls_avg_concatenates_class_token_and_patch_mean(backbone, prefix):
    embedder = made(backbone, pooling="cls-avg").eval()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        tokens = embedder.backbone.forward_features(pixels)
        features = embedder.features(pixels)
    assert tokens.shape[1] == prefix + 4
    assert embedder.width == 2 * tokens.shape[2]
    assert torch.equal(features[:, : tokens.shape[2]], tokens[:, 0])
    torch.testing.assert_close(features[:, tokens.shape[2] :], tokens[:, prefix:].mean(1))


def test_cls_avg_applies_fc_norm_to_both_parts():
    model = VisionTransformer(32, embed_dim=16, depth=1, num_heads=2, global_pool="avg").eval()
    with torch.no_grad():
        model.fc_norm.weight.fill_(3.0)
        found = class_and_patches(model, torch.randn(2, 3, 32, 32))
    parts = found.reshape(4, 16)
    torch.testing.assert_close(parts.std(1, correction=0), torch.full((4,), 3.0), rtol=0.01, atol=0)


def test_pretrained_image_size_is_accepted():
    """SigLIP was trained at 384 pixels, not a multiple of 14."""
    with torch.device("meta"):
        model = timm.create_model("vit_so400m_patch14_siglip_384", num_classes=0)
    check_patches(model, "siglip", (384, 384))
    with pytest.raises(ValueError, match="392 or 406"):
        check_patches(model, "siglip", (400, 400))


def test_position_embeddings_of_files_are_resampled(tmp_path):
    torch.manual_seed(0)
    big = build("test_vit", (96, 96))
    save_file(big.state_dict(), tmp_path / "weights.safetensors")
    small = Embedder.create("test_vit", 8, weights=tmp_path / "weights.safetensors", image_size=64)
    overlay = {"state_dict": big.state_dict()}
    expected = timm.create_model(
        "test_vit", True, pretrained_cfg_overlay=overlay, num_classes=0, img_size=64
    )
    for key, value in expected.state_dict().items():
        assert torch.equal(small.backbone.state_dict()[key], value), key
    other = {**big.state_dict(), "pos_embed": torch.zeros(1, 40, 64)}
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="does not fit test_vit"):
        Embedder.create("test_vit", 8, weights=tmp_path / "other.safetensors", image_size=64)


def test_backbone_layers_equal_timms_groups():
    embedder = made("test_vit3")  # nine blocks and attention pooling
    layers = embedder.backbone_layers()
    named = {id(value): name for name, value in embedder.backbone.named_parameters()}
    names = [{named[id(value)].split(".")[0] for value in layer} for layer in layers]
    assert {"patch_embed", "pos_embed"} <= names[0]
    assert names[1:] == [{"blocks"}] * 8 + [{"blocks", "norm"}, {"attn_pool"}]
    found = [id(value) for layer in layers for value in layer]
    assert sorted(found) == sorted(id(p) for p in embedder.parameter_parts()["backbone"])
    with pytest.raises(ValueError, match="small_convnet"):
        made("small_convnet").backbone_layers()
    with pytest.raises(ValueError, match="backbone_layers"):
        parameter_groups(torch.nn.Linear(4, 8), ProxyAnchor(3, 8), lr=1e-3, layer_decay=0.5)
    for wrong in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="layer_decay must be"):
            parameter_groups(embedder, ProxyAnchor(3, 8), lr=1e-3, layer_decay=wrong)


LAYERED = made("test_vit")


@given(decay=st.floats(0.1, 0.99), lr=st.floats(1e-6, 1.0))
def test_layer_decay(decay, lr):
    loss = ProxyAnchor(num_classes=3, dim=8)
    plain = parameter_groups(LAYERED, loss, lr=lr)
    groups = parameter_groups(LAYERED, loss, lr=lr, layer_decay=decay)
    assert groups[0]["lr"] == plain[0]["lr"] == lr  # reported as lr
    count = len(LAYERED.backbone_layers())
    for depth, group in enumerate(groups[:count]):
        assert group["lr"] == pytest.approx(lr * decay**depth)
    assert [group["name"] for group in groups[count:]] == ["head", "proxies"]
    assert [group["lr"] for group in groups[count:]] == [g["lr"] for g in plain[1:]]
    before, after = ({id(p) for group in one for p in group["params"]} for one in (plain, groups))
    assert before == after


peft = pytest.importorskip("peft")


@pytest.mark.parametrize("backbone", ["test_vit3", "tiny_dinov3"])
def test_merged_lora_equals_trained_network(backbone, tmp_path):
    embedder = made(backbone, normalize=False)
    pixels = torch.randn(4, 3, 32, 32)
    with torch.inference_mode():
        before = embedder.eval()(pixels)
    assert add_lora(embedder, 2, 3.0) is embedder
    assert any("lora" in name for name in embedder.state_dict())
    plain = merged_copy(embedder)
    assert not any("lora" in name for name in plain.state_dict())
    merge_lora(embedder, plain)
    with torch.inference_mode():  # updates start at zero
        torch.testing.assert_close(embedder.eval()(pixels), before)
        torch.testing.assert_close(plain.eval()(pixels), before)
    parts = embedder.parameter_parts()
    trained = [p for p in embedder.backbone.parameters() if p.requires_grad]
    assert {id(p) for p in parts["backbone"]} == {id(p) for p in trained}
    blocks = len(embedder.backbone.blocks)
    assert len(trained) == blocks * 4 * 2  # qkv, proj, fc1, fc2: two matrices each
    optimizer = torch.optim.SGD([*parts["backbone"], *parts["head"]], lr=0.1)
    frozen = {n: p.clone() for n, p in embedder.backbone.named_parameters() if not p.requires_grad}
    for _ in range(3):
        optimizer.zero_grad()
        embedder.train()(pixels).square().mean().backward()
        assert all(p.grad is not None for p in trained)  # DDP would wait otherwise
        optimizer.step()
    for name, value in embedder.backbone.named_parameters():
        assert name not in frozen or torch.equal(value, frozen[name]), name
    merge_lora(embedder, plain)
    with torch.inference_mode():
        after = embedder.eval()(pixels)
        torch.testing.assert_close(plain(pixels), after, rtol=1e-4, atol=1e-5)
    assert (after - before).abs().max() > 1e-3
    plain.save(tmp_path / "plain")
    assert torch.equal(Embedder.load(tmp_path / "plain").encode(images()), plain.encode(images()))


def test_lora_requirements(monkeypatch):
    for name in ("small_convnet", "test_efficientnet"):
        with pytest.raises(ValueError, match=name):
            add_lora(made(name), 4)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match="extra 'lora'"):
        add_lora(made("test_vit"), 4)
