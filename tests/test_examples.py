"""The examples run, and show what they claim."""

import pytest

from examples import lightning_example, regularface_digits


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_the_proxies_too():
    assert lightning_example.main() > 0.8


def test_the_exclusive_term_spreads_three_digits(monkeypatch, tmp_path):
    monkeypatch.setattr(regularface_digits, "STEPS", 150)
    names = ("center loss", "ArcFace")
    panels = [regularface_digits.train(n, exclusive=e) for n in names for e in (False, True)]
    for without, with_term in (panels[:2], panels[2:]):
        assert with_term.smallest_angle > 110 > without.smallest_angle
    regularface_digits.draw(panels, str(tmp_path / "digits.png"))
    assert (tmp_path / "digits.png").stat().st_size > 10_000
