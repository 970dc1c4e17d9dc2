import pytest

from tests.reproduce.small import make_data, make_table, run_table


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("reproduce"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("pixels")


@pytest.fixture(scope="session")
def whole(data, cache, tmp_path_factory):
    """The results of an uninterrupted run of the small table with two seeds; read-only."""
    lines = []
    out = tmp_path_factory.mktemp("whole")
    home = run_table(make_table(cache), data, out, lines.append, seeds=(0, 1))
    return home, lines
