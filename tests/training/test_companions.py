"""Companions: the term itself, what is added to what, and whole runs with them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from proximetry.models import Embedder
from proximetry.training import Recipe, train
from proximetry.training.companions import divergence
from proximetry.training.objective import Objective
from proximetry.training.parts import make_optimizer
from proximetry.training.recipe import Loss
from proximetry.training.recipe_values import RecipeError
from tests.training.test_trainer import assert_same_run, killed_at
from tests.training.tiny import with_


def written_out(learner, teacher, temperature):
    """KL over the batch, by its definition."""
    rows = []
    for vectors in (teacher, learner):
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        e = np.exp(unit @ unit.T / temperature)
        rows.append(e / e.sum(1, keepdims=True))
    p, q = rows
    return temperature**2 * np.mean((p * np.log(p / q)).sum(1))


@given(
    batch=st.integers(1, 7),
    narrow=st.integers(1, 5),
    wide=st.integers(1, 9),
    temperature=st.floats(0.05, 3.0),
    seed=st.integers(0, 99),
)
def test_the_divergence_is_its_definition(batch, narrow, wide, temperature, seed):
    draw = np.random.default_rng(seed)
    learner, teacher = draw.normal(size=(batch, narrow)), draw.normal(size=(batch, wide))
    found = divergence(torch.from_numpy(learner), torch.from_numpy(teacher), temperature)
    assert found.item() == pytest.approx(written_out(learner, teacher, temperature), abs=1e-12)
    assert found.item() >= -1e-12


def test_a_learner_that_sees_what_the_teacher_sees_has_nothing_to_learn():
    torch.manual_seed(0)
    teacher = torch.randn(6, 4, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(9, 4, dtype=torch.float64))[0]
    learner = (3 * teacher @ turn.T).requires_grad_()  # turned, longer and in more dimensions
    value = divergence(learner, teacher, 0.3)
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-14)
    assert learner.grad.abs().max() < 1e-14


def make_objective(**keys):
    torch.manual_seed(0)
    recipe = Loss(companions=(10, 14), **keys)
    return Objective(recipe, ["a", "b", "c"], dim=4, width=6).double()


def test_the_objective_is_the_sum_of_its_parts():
    objective = make_objective(distill=7.0, distill_temperature=0.5, settings={"margin": 0.2})
    torch.manual_seed(1)
    vectors, labels = torch.randn(5, 10, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])
    embeddings, features = vectors[:, :4], vectors[:, 4:]
    beside = []
    for head, loss in zip(objective.companions.heads, objective.companions.losses, strict=True):
        wide = torch.nn.functional.normalize(head(features))
        learned = written_out(embeddings.numpy(), wide.detach().numpy(), 0.5)
        beside.append(loss(wide, labels).item() + 7.0 * learned)
        assert loss.margin == 0.2
        assert loss.proxies.names == ["a", "b", "c"]
    expected = objective.loss(embeddings, labels).item() + np.mean(beside)
    assert objective(vectors, labels).item() == pytest.approx(expected, abs=1e-12)


def test_companions_learn_from_their_own_loss_alone():
    objective, plain = make_objective(distill=1000.0), make_objective()
    torch.manual_seed(1)
    vectors, labels = torch.randn(5, 10, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])
    for one in (objective, plain):
        one(vectors, labels).backward()
    taught, alone = ([p.grad for p in one.companions.parameters()] for one in (objective, plain))
    assert all(torch.equal(a, b) for a, b in zip(taught, alone, strict=True))


def test_companions_are_learned_at_the_rates_of_their_kind(recipe):
    torch.manual_seed(0)
    objective = Objective(Loss(companions=(10,)), ["a", "b"], dim=8, width=64)
    embedder = Embedder.create("small_convnet", 8, weights="none", image_size=24)
    recipe = with_(recipe, "optimizer", head_multiplier=3.0)
    groups = {g["name"]: g for g in make_optimizer(recipe, embedder, objective).param_groups}
    shapes = {name: [tuple(p.shape) for p in group["params"]] for name, group in groups.items()}
    assert shapes["proxies"] == [(2, 1, 8), (2, 1, 10)]
    assert (10, 64) in shapes["head"]
    assert (10, 10) in shapes["head"]
    assert "loss" not in groups
    assert groups["head"]["lr"] == pytest.approx(3e-3)


@pytest.mark.parametrize("changes", [{}, {"layer_norm": True, "normalize": False, "dim": 5}])
def test_a_run_leaves_them_behind(recipe, tmp_path, changes):
    recipe = with_(recipe, "loss", companions=(12, 20), distill=5.0)
    recipe = with_(recipe, "model", **changes)
    recipe = with_(recipe, "training", ema=0.9)
    results = train(recipe, tmp_path / "run")
    assert results["last"]["held_out"]["recall@1"] > 0
    (file,) = (tmp_path / "run" / "embedder").glob("*.safetensors")
    saved = load_file(file)
    assert not any("companion" in key for key in saved)
    assert Embedder.load(tmp_path / "run" / "embedder").dim == recipe.model.dim
    kept = load_file(tmp_path / "run" / "checkpoints" / "last.safetensors")
    assert sum("companions.heads" in key for key in kept) >= 8


def test_a_killed_run_with_companions_continues_bit_for_bit(recipe, tmp_path, monkeypatch):
    recipe = with_(recipe, "loss", companions=(12,), distill=5.0)
    recipe = with_(recipe, "training", checkpoint_steps=2)
    train(recipe, tmp_path / "whole")
    killed_at(5, recipe, tmp_path / "cut", monkeypatch)
    train(recipe, tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_the_embedding_comes_to_see_what_the_companion_sees(recipe, tmp_path):
    """With much weight on it the divergence of a run falls well below that of one without."""
    files = sorted(Path(recipe.data.root).glob("*/*.png"))
    found = {}
    for weight in (0.0, 1000.0):
        changed = with_(recipe, "loss", companions=(16,), distill=weight, distill_temperature=0.2)
        changed = with_(changed, "training", epochs=12)
        changed = with_(changed, "evaluation", protocol="last")
        folder = tmp_path / str(weight)
        train(changed, folder)
        state = load_file(folder / "checkpoints" / "last.safetensors")
        embedder = Embedder.load(folder / "embedder")
        objective = Objective(changed.loss, [f"class{i:02d}" for i in range(8)], 8, embedder.width)
        objective.load_state_dict(
            {k.removeprefix("loss."): v for k, v in state.items() if k.startswith("loss.")}
        )
        pixels = torch.stack([torch.from_numpy(np.array(Image.open(f))) for f in files])
        with torch.no_grad():
            features = embedder.features(
                embedder.preprocessing.normalise(pixels.permute(0, 3, 1, 2).contiguous())
            )
            wide = objective.companions.heads[0](features)
            found[weight] = divergence(embedder.project(features), wide, 0.2).item()
    assert found[1000.0] < 0.5 * found[0.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"distill": 1.0}, r"loss\.distill needs companions to learn from"),
        ({"companions": [0]}, r"loss\.companions are widths of at least 1, got \[0\]"),
        ({"companions": [8], "distill": -1.0}, r"loss\.distill must not be negative"),
        ({"companions": [8], "distill_temperature": 0.0}, r"distill_temperature must be positive"),
        ({"companions": "wide"}, r"loss\.companions"),
    ],
)
def test_mistakes_are_named(values, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.from_dict({"loss": values})
