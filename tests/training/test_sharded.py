"""Runs with sharded proxies, on any number of ranks; checkpoints load on any number."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from proximetry import losses
from proximetry.losses import sharded
from proximetry.recipe.loading import RecipeError
from proximetry.reports.run_proxies import read_proxies
from proximetry.training import RunFolder, checkpoint, train
from tests.training.ranks import DIE, RUN, STEP, Ranks, with_failure
from tests.training.tiny import make_images, make_recipe


def sharded_recipe(images, cache, **training):
    """Without batch statistics, which differ by rank."""
    return make_recipe(
        images,
        cache,
        model={"freeze_batchnorm": True},
        optimizer={"name": "sgd", "lr": 1e-3},
        data={"sampler": "balanced", "images_per_class": 2, "batch_size": 12, "cache": "none"},
        loss={"name": "mpa", "settings": {"proxies_per_class": 2}, "sharded": True},
        training={"accumulate": 2, "ema": 0.9, "checkpoint_steps": 1, **training},
    )


def all_tensors(folder):
    """Return the tensors of the last checkpoint, those of its shards concatenated."""
    saved = RunFolder(folder)
    tensors = load_file(saved.last)
    names = checkpoint.read_header(saved.last)[0]["state"]["shards"]
    shards = [load_file(saved.last.parent / name) for name in names]
    for key in shards[0]:
        tensors[key] = torch.cat([shard[key] for shard in shards])
    return tensors


@pytest.mark.slow
def test_run_continues_on_another_number_of_ranks(server, cache, tmp_path):
    images = make_images(tmp_path / "images")
    longer = sharded_recipe(images, cache, epochs=3)
    train(longer, tmp_path / "one", device="cpu")
    out, recipe = tmp_path / "out", tmp_path / "recipe.yaml"
    sharded_recipe(images, cache, epochs=2).save(recipe)
    for size, code, ended in ((2, with_failure(DIE, 1, STEP, 3), [1, -9]), (3, RUN, [0, 0, 0])):
        ranks = Ranks(server, tmp_path / str(size), code, recipe, out, size=size)
        assert ranks.ended() == ended, ranks.output(0) + ranks.output(1)
        shards = list((out / "checkpoints").glob("shard-*"))
        assert size <= len(shards) <= 2 * size  # of the last step and perhaps of the best
    results = train(longer, out, device="cpu")
    expected, got = all_tensors(tmp_path / "one"), all_tensors(out)
    assert expected.keys() == got.keys()
    assert {"weight", "optimizer.momentum_buffer"} <= got.keys()
    assert got["weight"].shape == (9, 2, 8)
    for key, tensor in expected.items():
        if tensor.is_floating_point():
            assert (got[key] - tensor).norm() <= 1e-4 * tensor.norm(), key
    assert "proxies" not in results["last"]
    with pytest.raises(ValueError, match="sharded"):
        read_proxies(SimpleNamespace(folder=RunFolder(out)))


def on_ranks(monkeypatch, classes, ranks, step=False):
    """Return loss and optimizer of each rank, after a step if set."""
    built = []
    for rank in range(ranks):
        torch.manual_seed(0)
        loss = losses.MPA(classes, 3, proxies_per_class=2)
        with monkeypatch.context() as context:
            context.setattr(sharded, "_rank", lambda group, rank=rank: rank)
            context.setattr(sharded, "_ranks", lambda group: ranks)
            context.setattr(sharded.dist, "broadcast_object_list", lambda *_, **__: None)
            context.setattr(sharded.dist, "get_backend", lambda *_: "gloo")
            losses.shard(loss)
        optimizer = torch.optim.Adam(loss.parameters(), lr=0.1)
        if step:
            loss.proxies.weight.square().sum().backward()
            optimizer.step()
        built.append((loss, optimizer))
    return built


def test_shards_load_on_any_number_of_ranks_bit_for_bit(monkeypatch, tmp_path):
    folder = RunFolder(tmp_path)
    folder.last.parent.mkdir()
    saved = on_ranks(monkeypatch, 7, 2, step=True)
    names = []
    for rank, (loss, optimizer) in enumerate(saved):
        objective = SimpleNamespace(proxies=loss.proxies)
        updater = SimpleNamespace(objective=objective, optimizer=optimizer)
        state = SimpleNamespace(step=1)
        world = SimpleNamespace(rank=rank, size=2, gather=lambda name: [name])
        run = SimpleNamespace(updater=updater, folder=folder, state=state, world=world)
        names += checkpoint._save_shards(run)
    loss, optimizer = saved[0]
    checkpoint.save_checkpoint(folder.last, {"loss": loss}, optimizer, {"shards": names})
    whole = torch.cat([loss.proxies.weight for loss, _ in saved])
    moments = torch.cat([o.state[loss.proxies.weight]["exp_avg"] for loss, o in saved])
    for ranks in (1, 2, 3, 7):
        for loss, optimizer in on_ranks(monkeypatch, 7, ranks):
            checkpoint.load_checkpoint(folder.last, {"loss": loss}, optimizer)
            own = slice(loss.proxies.start, loss.proxies.stop)
            assert torch.equal(loss.proxies.weight, whole[own])
            state = optimizer.state[loss.proxies.weight]
            assert torch.equal(state["exp_avg"], moments[own])
            assert state["step"] == 1
    (folder.last.parent / names[1]).write_bytes((folder.last.parent / names[0]).read_bytes())
    with pytest.raises(checkpoint.CheckpointError, match="class"):
        checkpoint.load_checkpoint(folder.last, {"loss": loss}, optimizer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"exclusive": 0.1}}, "exclusive"),
        ({"loss": {"angular_center": 0.1}}, "angular_center"),
        ({"training": {"precision": "float16"}}, "float16"),
    ],
)
def test_recipe_rejects_what_sharded_proxies_do_not_support(images, cache, changes, message):
    with pytest.raises(RecipeError, match=message):
        sharded_recipe(images, cache).override(changes)


def test_pair_losses_have_no_proxies_to_shard(images, cache, tmp_path):
    recipe = make_recipe(images, cache, loss={"name": "pairs/contrastive", "sharded": True})
    with pytest.raises(RecipeError, match=r"loss\.sharded needs proxies"):
        train(recipe, tmp_path, device="cpu")
