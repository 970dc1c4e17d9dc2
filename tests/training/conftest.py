import pytest

from proximetry.training import train
from tests.training.runs import killed_at
from tests.training.tiny import make_images, make_recipe


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def recipe(images, cache):
    return make_recipe(images, cache)


# For files with a module-scoped recipe that saves checkpoints within epochs.


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    train(recipe, out)
    return out


@pytest.fixture(scope="module")
def interrupted_run(recipe, tmp_path_factory):
    """A run killed in its third epoch; the second one was the best."""
    out = tmp_path_factory.mktemp("cut") / "run"
    killed_at(11, recipe, out)
    return out
