"""Training with losses that have a state or random numbers."""

import pytest

from proximetry.training import train
from tests.training.runs import assert_same_run, killed_at, tensors
from tests.training.tiny import make_images, make_recipe

LOSSES = ["adaface", "curricularface", "elasticface", "magface", "uniface"]


@pytest.mark.parametrize("name", LOSSES)
def test_resumed_run_is_bit_exact(name, images, cache, tmp_path):
    recipe = make_recipe(
        images, cache, loss={"name": name}, training={"epochs": 2, "checkpoint_steps": 2}
    )
    train(recipe, tmp_path / "whole")
    killed_at(3, recipe, tmp_path / "resumed")
    train(recipe, tmp_path / "resumed")
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


def test_trainer_sets_the_class_counts(cache, tmp_path):
    images = make_images(tmp_path / "images")
    (images / "class00" / "0.png").unlink()
    recipe = make_recipe(
        images, cache, loss={"name": "dynamic_margin"}, training={"epochs": 1},
        evaluation={"protocol": "last"},
    )  # fmt: skip
    train(recipe, tmp_path / "run")
    (counts,) = (v for k, v in tensors(tmp_path / "run").items() if "class_counts" in k)
    assert counts.tolist() == [3.0] + 11 * [4.0]
