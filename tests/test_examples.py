"""The examples run and show what they claim."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from examples import lightning_example, regularface_digits
from proximetry.training import RunFolder
from proximetry.training.evaluator import selection_value
from tests.training.tiny import make_images, make_recipe


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


@pytest.mark.filterwarnings("ignore")
def test_optuna_searches_on_held_out_classes(tmp_path):
    pytest.importorskip("optuna")
    from examples import optuna_example

    images = make_images(tmp_path / "images")
    recipe = make_recipe(images, tmp_path / "cache", evaluation={"final_test": False})
    study = optuna_example.search(tmp_path, trials=2, recipe=recipe)
    results = RunFolder(tmp_path / f"trial-{study.best_trial.number}").read_results()
    assert study.best_value == selection_value(results["selected"]["held_out"], "map@r")
    assert "test" not in results["selected"]
    assert set(study.best_params) == {"optimizer.lr", "loss.settings.alpha"}


NOTEBOOKS = sorted(Path(lightning_example.__file__).parent.glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebooks_run(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for their images and runs
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # other tests need the cores, too
    cells = nbformat.read(notebook, 4)
    for cell in cells.cells:  # committed notebooks have no outputs
        assert not cell.get("outputs")
        assert not cell.get("execution_count")
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(cells, timeout=600, kernel_name="python3", resources=place).execute()
