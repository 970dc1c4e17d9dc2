import pytest

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
