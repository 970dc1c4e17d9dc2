# Two commands set everything up on a machine with Python >= 3.11, make and git:
#   make demo    see it work
#   make test    run the tests, but for a few that take long
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Tests start many processes; compiled bytecode makes each start several seconds faster.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all lint types docs bench pins clean
.DEFAULT_GOAL := demo

# The environment is built once and again only when what it is built from changes.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Proximetry needs Python 3.11 or newer; say which with: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/proximetry demo

# Three processes for two cores: many tests wait for processes of their own. `make test-all` runs the
# tests too that take long each, as CI does.
test test-all: $(READY)
	@command -v chromium > /dev/null \
	  || echo "There is no chromium: tests of the search page will be skipped; apt-get install chromium"
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
	  $(if $(filter test,$@),-m 'not slow') $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m benchmarks.check_results

types: $(READY)
	$(BIN)/mypy

# Fill in the parts of docs/ that the code declares, and the page of results; then build site/.
# Material for MkDocs warns of MkDocs 2, which pyproject.toml keeps out.
docs: $(READY)
	$(BIN)/python docs/generate.py
	$(BIN)/python -m benchmarks.results_page
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The documentation is in site/index.html"

bench: $(READY)
	$(BIN)/python -m benchmarks.losses

# Refresh constraints.txt: plain pins, no addresses.
pins: $(READY)
	$(BIN)/uv pip compile --quiet --upgrade --extra dev --no-header --no-annotate --no-emit-index-url \
	  --constraint pins.in pyproject.toml --output-file constraints.txt

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis site
