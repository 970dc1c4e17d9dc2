"""Two gloo processes equal one: losses, gradients, whole runs, checkpoints both ways."""

import json

import pytest
import torch
from safetensors.torch import load_file

from proximetry.losses import LOSSES
from proximetry.recipe.loading import flatten
from proximetry.training import train
from tests.training.ranks import RUN, Ranks
from tests.training.tiny import make_images, make_recipe

GRADIENTS = """
import itertools, json, sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from proximetry import losses
from proximetry.losses.gathered_loss import gather_with_gradient as gather
from proximetry.training.distributed import average_gradients, join_processes, process_group
world = join_processes("cpu")
torch.manual_seed(0)
x, y = torch.randn(10, 6, dtype=torch.float64), torch.randint(0, 5, (10,))
cut = 7  # uneven shares
mine = slice(0, cut) if world.rank == 0 else slice(cut, 10)
worst = {}
for name, share in itertools.product(losses.LOSSES, (1.0, 0.8)):
    torch.manual_seed(1)
    net, loss = nn.Linear(6, 4), losses.create(name, 15, 4, sampled_negatives=share)
    net, loss = net.double(), loss.double()
    state = {key: value.clone() for key, value in loss.state_dict().items()}
    torch.manual_seed(2)  # the same seed on all ranks, as in the trainer
    whole = loss(net(x), y)
    expected = torch.autograd.grad(whole, [*net.parameters(), loss.proxies.weight])
    loss.load_state_dict(state)
    shared = DistributedDataParallel(net)
    torch.manual_seed(2)
    value = loss(gather(shared(x[mine])), gather(y[mine]))
    value.backward()
    average_gradients(loss.parameters(), world)
    got = [p.grad for p in [*net.parameters(), loss.proxies.weight]]
    differences = [abs(value.item() - whole.item())]
    differences += [(a - b).abs().max().item() for a, b in zip(got, expected)]
    worst[f"{name} {share}"] = max(differences)
if world.is_main:
    open(sys.argv[1], "w").write(json.dumps(worst))
del shared  # else it frees the process group at the exit of the interpreter
with process_group(world):
    pass
"""


def test_value_and_gradients_of_every_loss_on_two_ranks(server, tmp_path):
    ranks = Ranks(server, tmp_path, GRADIENTS, tmp_path / "worst.json")
    assert ranks.ended() == [0, 0], ranks.output(0)
    worst = json.loads((tmp_path / "worst.json").read_text())
    assert {name.split()[0] for name in worst} == set(LOSSES)
    for name, difference in worst.items():
        assert difference < 1e-12, name


def recipe_for(images, cache, **training):
    """Without batch statistics, which differ by rank."""
    return make_recipe(
        images,
        cache,
        model={"freeze_batchnorm": True, "bits": 8},
        optimizer={"name": "sgd", "lr": 1e-3},
        data={"sampler": "balanced", "images_per_class": 2},
        training={"epochs": 2, **training},
    )


def floats(folder):
    found = load_file(folder / "checkpoints" / "last.safetensors")
    return {k: v for k, v in found.items() if v.is_floating_point()}


@pytest.mark.slow
def test_two_ranks_equal_one(server, cache, tmp_path):
    images = make_images(tmp_path / "images", each=5)  # 15 held out: 7 and 8 per rank
    recipe = recipe_for(images, cache)
    recipe.override({"data.cache": "none"}).save(tmp_path / "recipe.yaml")
    single = train(recipe, tmp_path / "one", device="cpu")
    ranks = Ranks(server, tmp_path, RUN, tmp_path / "recipe.yaml", tmp_path / "two")
    assert ranks.ended() == [0, 0], ranks.output(0)
    one, two = floats(tmp_path / "one"), floats(tmp_path / "two")
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=1e-3, atol=1e-5)
    double = json.loads((tmp_path / "two" / "results.json").read_text())
    for key, value in flatten(single["selected"]["held_out"]).items():
        # Weights may differ by rounding, which can flip a bit of a code.
        tolerance = 0.05 if key.startswith("codes.") else 1e-9
        assert flatten(double["selected"]["held_out"])[key] == pytest.approx(value, abs=tolerance)
    # A run started on two ranks is extended on one.
    longer = recipe_for(images, cache, epochs=3)
    train(longer, tmp_path / "whole", device="cpu")
    train(longer, tmp_path / "two", device="cpu")
    whole, continued = floats(tmp_path / "whole"), floats(tmp_path / "two")
    for key in whole:
        torch.testing.assert_close(continued[key], whole[key], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_error_on_rank_0_ends_all(server, images, cache, tmp_path):
    recipe_for(images, cache).save(tmp_path / "recipe.yaml")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")
    ranks = Ranks(server, tmp_path, RUN, tmp_path / "recipe.yaml", tmp_path / "out")
    assert all(ranks.ended())
    assert all("is not empty" in ranks.output(rank) for rank in (0, 1))
