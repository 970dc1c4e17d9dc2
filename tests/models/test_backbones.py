import warnings

import pytest
import torch
from timm.layers import DropPath
from torch import nn
from torch.nn import functional as F

from proximetry.kernels.layers import fuse
from proximetry.models import Embedder, list_backbones
from proximetry.models.backbones import build, load_timm, prepare, set_drop_path
from proximetry.models.backbones.bn_inception import _BLOCKS
from tests.models import transformers  # noqa: F401 (importing registers tiny_dinov3)

timm = load_timm()
WITHOUT_CLASS_TOKEN = "test_vit2", "test_vit3", "test_resnet"  # registers only; a feature map


# Inputs, 1×1, (reduce, 3×3), (reduce, double 3×3) and projection of each block.
BN_INCEPTION = {
    "3a": (192, 64, (64, 64), (64, 96), 32),
    "3b": (256, 64, (64, 96), (64, 96), 64),
    "3c": (320, 0, (128, 160), (64, 96), 0),
    "4a": (576, 224, (64, 96), (96, 128), 128),
    "4b": (576, 192, (96, 128), (96, 128), 128),
    "4c": (576, 160, (128, 160), (128, 160), 128),
    "4d": (608, 96, (128, 192), (160, 192), 128),
    "4e": (608, 0, (128, 192), (192, 256), 0),
    "5a": (1056, 352, (192, 320), (160, 224), 128),
    "5b": (1024, 352, (192, 320), (192, 224), 128),
}


def expected_bn_inception():
    """Names and shapes of the Caffe network."""
    names = {"conv1_7x7_s2": (64, 3, 7), "conv2_3x3_reduce": (64, 64, 1), "conv2_3x3": (192, 64, 3)}
    for block, (width, one, three, double, projection) in BN_INCEPTION.items():
        key = f"inception_{block}_"
        if one:
            names[f"{key}1x1"] = (one, width, 1)
            names[f"{key}pool_proj"] = (projection, width, 1)
        names[f"{key}3x3_reduce"] = (three[0], width, 1)
        names[f"{key}3x3"] = (three[1], three[0], 3)
        names[f"{key}double_3x3_reduce"] = (double[0], width, 1)
        names[f"{key}double_3x3_1"] = (double[1], double[0], 3)
        names[f"{key}double_3x3_2"] = (double[1], double[1], 3)
    shapes = {}
    for name, (out, width, kernel) in names.items():
        shapes[f"{name}.weight"] = (out, width, kernel, kernel)
        shapes[f"{name}.bias"] = (out,)
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}_bn.{part}"] = (out,)
    return shapes


def test_bn_inception_has_the_checkpoints_names_and_shapes():
    model = timm.create_model("bn_inception")
    found = {
        key: tuple(value.shape)
        for key, value in model.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    linear = {"last_linear.weight": (1000, 1024), "last_linear.bias": (1000,)}
    assert found == expected_bn_inception() | linear
    assert sum(value.numel() for value in model.parameters()) == 11_295_240


def test_bn_inception_block_equals_functional_calls():
    model = timm.create_model("bn_inception", num_classes=0).eval()

    def unit(name, x, stride=1):
        conv, bn = getattr(model, name), getattr(model, f"{name}_bn")
        x = F.conv2d(x, conv.weight, conv.bias, stride, conv.kernel_size[0] // 2)
        x = F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias)
        return F.relu(x)

    with torch.inference_mode():
        x = torch.randn(1, 320, 8, 8)
        key = "inception_3c_"
        deep = unit(f"{key}double_3x3_1", unit(f"{key}double_3x3_reduce", x))
        expected = torch.cat(
            [
                unit(f"{key}3x3", unit(f"{key}3x3_reduce", x), 2),
                unit(f"{key}double_3x3_2", deep, 2),
                F.max_pool2d(x, 3, 2, ceil_mode=True),
            ],
            1,
        )
        torch.testing.assert_close(model._run_block(_BLOCKS[2], x), expected)
        x = torch.randn(1, 1024, 4, 4)
        pooled = unit("inception_5b_pool_proj", F.max_pool2d(x, 3, 1, 1))
        torch.testing.assert_close(model._run_block(_BLOCKS[9], x)[:, -128:], pooled)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("bn_inception", {"image_size": 120}, "120×120"),
        ("test_vit", {"pooling": "gem"}, "feature map"),
        ("test_resnet", {"pooling": "token"}, "transformers"),
        *((name, {"pooling": "cls-avg"}, "class token") for name in WITHOUT_CLASS_TOKEN),
        ("test_vit", {"image_size": 50}, "image_size 50 .*48 or 64"),
        ("tiny_dinov3", {"image_size": 15}, "image_size 15 .*16 or more"),
        # timm drops the last pixels of each side
        ("vit_small_patch14_dinov2", {"image_size": 60}, "image_size 60 .*56 or 70"),
        ("rsnet50", {}, "'resnet50'"),
        *((name, {}, "unknown backbone") for name in ("hf-hub:someone/something", "", None)),
        ("resnet18.nonsense", {}, "unknown backbone .*'resnet18'"),
        ("resnet18.nonsense", {"weights": "auto"}, "unknown backbone .*'resnet18'"),
        (nn.Identity(), {}, r"Embedder\.wrap"),
    ],
)
def test_backbone_rejects_invalid_names_sizes_and_poolings(name, settings, message):
    with pytest.raises(ValueError, match=message):
        Embedder.create(name, **{"weights": "none", "image_size": 32} | settings)


def test_sphereface20_has_twenty_convolutions_and_no_batch_norm():
    embedder = Embedder.create("sphereface20", 512, weights="none")
    kinds = [type(module) for module in embedder.modules()]
    assert kinds.count(nn.Conv2d) == kinds.count(nn.PReLU) == 20
    assert nn.BatchNorm2d not in kinds
    assert embedder.architecture.pooling == "flatten"
    assert embedder.head.weight.shape == (512, 512 * 7 * 6)


@pytest.mark.parametrize(
    ("name", "channels", "stride"),
    [("bn_inception", 1024, 32), ("sphereface20", 512, 16), ("small_convnet", 128, 4)],
)
def test_custom_backbones_are_registered_in_timm(name, channels, stride):
    assert {name, "resnet50"} <= set(list_backbones())
    assert name not in list_backbones("resnet*")
    model = timm.create_model(name, num_classes=7).eval()
    _, height, width = model.pretrained_cfg["input_size"]
    pixels = torch.randn(1, 3, height, width)
    with torch.inference_mode():
        assert model(pixels).shape == (1, 7)
        features = model.forward_features(pixels)
    assert features.shape == (1, channels, height // stride, width // stride)
    with pytest.raises(RuntimeError, match=f"No pretrained weights exist for {name}"):
        timm.create_model(name, pretrained=True)


MAPS = "test_resnet", "test_convnext", "mobilenetv3_small_050", "test_mambaout", "test_efficientnet"


@pytest.mark.parametrize("name", MAPS)
def test_dropped_layers_do_not_change_features(name):
    """The feature map equals timm's, and all remaining parameters get a gradient."""
    torch.manual_seed(0)
    model = build(name).eval()
    pixels = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        before = model.forward_features(pixels)
    features = prepare(model, name, (64, 64))
    with torch.inference_mode():
        after = model.forward_features(pixels)
    assert torch.equal(before, after)
    assert after.shape[3 if features.channels_last else 1] == features.width
    model.forward_features(pixels).sum().backward()
    assert all(value.grad is not None for value in model.parameters() if value.requires_grad)


@pytest.mark.parametrize(
    "name",
    [
        *MAPS,
        "resnet18",
        "efficientnet_lite0",
        "convnext_atto",
        "vit_tiny_patch16_224",
        "lcnet_050",  # a convolution after the pooling
        "bn_inception",
    ],
)
def test_auto_pooling_equals_timms_pre_logits(name):
    torch.manual_seed(0)
    reference = timm.create_model(name).eval()
    size = 224 if name.startswith("vit") else 64
    embedder = Embedder.create(name, None, weights="none", normalize=False, image_size=size).eval()
    state = reference.state_dict()
    embedder.backbone.load_state_dict({key: state[key] for key in embedder.backbone.state_dict()})
    pixels = torch.randn(2, 3, size, size)
    with torch.inference_mode():
        features = reference.forward_features(pixels)
        expected = reference.forward_head(features, pre_logits=True)
        assert torch.equal(embedder(pixels), expected)


@pytest.mark.parametrize(("pooling", "width"), [("auto", 1024), ("avg", 288), ("gem", 288)])
def test_explicit_pooling_warns_about_dropped_layers(pooling, width, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        embedder = Embedder.create(
            "mobilenetv3_small_050", 8, weights="none", pooling=pooling, image_size=64
        )
    assert embedder.width == width
    assert ["conv_head" in str(one.message) for one in caught] == [True] * (pooling != "auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = Embedder.load(embedder.save(tmp_path / "embedder"))
    assert again.fingerprint() == embedder.fingerprint()


def drop_path_rates(model):
    return {name: part.drop_prob for name, part in model.named_modules() if type(part) is DropPath}


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "test_vit"])
def test_drop_path_equals_timm_and_is_inactive_in_evaluation(name):
    embedder = Embedder.create(name, 8, weights="none", image_size=64)
    pixels = torch.randn(8, 3, *embedder.preprocessing.crop)
    with torch.no_grad():
        before = embedder.eval()(pixels)
        set_drop_path(embedder.backbone, name, 0.9)
        expected = timm.create_model(name, num_classes=0, drop_path_rate=0.9)
        rates = drop_path_rates(embedder.backbone)
        assert rates == drop_path_rates(expected)
        assert max(rates.values()) > 0.5
        assert torch.equal(embedder(pixels), before)
        fuse(embedder).train()
        found = []
        for seed in (0, 1, 0):
            torch.manual_seed(seed)
            found.append(embedder(pixels))
    assert not torch.allclose(found[0], found[1], atol=1e-3)
    assert torch.equal(found[0], found[2])


def test_drop_path_needs_blocks():
    for name in ("small_convnet", "custom:Net"):
        assert not set_drop_path(nn.Identity(), name, 0.5)
