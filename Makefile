# Needs Python 3.11 or newer, make and git. Each target first creates the environment .venv.
#   make demo        train, evaluate and search on the built-in glyphs
#   make test        run all tests except the slow ones
#   make test-all    run all tests
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Tests start many processes; compiled bytecode makes each start several seconds faster.
export PYTHONDONTWRITEBYTECODE :=

# Tests of a Milvus server are skipped without one: `make .milvus/.ready` installs it.
export MILVUS_SERVER ?= $(abspath $(wildcard .milvus/bin/milvus-server))

.PHONY: demo test test-all lint types docs bench pins clean
.DEFAULT_GOAL := demo

# The environment is rebuilt when the dependencies change.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Proximetry needs Python 3.11 or newer. Choose an interpreter: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	@touch $@

.milvus/.ready: $(READY)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .milvus
	$(BIN)/uv pip install --quiet --python .milvus/bin/python milvus==2.3.5
	@touch $@

demo: $(READY)
	$(BIN)/proximetry demo

# Three workers on two cores, because many tests wait for subprocesses.
test test-all: $(READY)
	@command -v chromium > /dev/null \
	  || echo "chromium not found: tests of the search page are skipped (apt-get install chromium)"
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
	  $(if $(filter test,$@),-m 'not slow') $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m benchmarks.check_results

types: $(READY)
	$(BIN)/mypy

# Update the generated parts of docs/ and docs/results.md, then build site/. The variable silences a
# warning of Material for MkDocs about MkDocs 2, which pyproject.toml excludes.
docs: $(READY)
	$(BIN)/python docs/generate.py
	$(BIN)/python -m benchmarks.results_page
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The documentation is in site/index.html"

bench: $(READY)
	$(BIN)/python -m benchmarks.losses

# Update constraints.txt.
pins: $(READY)
	$(BIN)/uv pip compile --quiet --upgrade --extra dev --no-header --no-annotate --no-emit-index-url \
	  --constraint pins.in pyproject.toml --output-file constraints.txt

clean:
	rm -rf .venv .milvus .pytest_cache .mypy_cache .ruff_cache .hypothesis site
