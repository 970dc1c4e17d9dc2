"""The examples run, and show what they claim."""

import pytest

from examples import lightning_example


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_the_proxies_too():
    assert lightning_example.main() > 0.8
