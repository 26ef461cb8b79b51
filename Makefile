# These commands do everything on a fresh machine with Python 3.10+ and pip; each makes its own .venv.
#   make quickstart   fold the zoo's eight experts into one model and score it
#   make test         lint, types, tests, and the documentation
#   make docs         the documentation as a site in site/
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test lint docs clean

quickstart: .venv/installed
	$(BIN)/safemerge fit --config quickstart.yaml

test: .venv/installed-dev lint
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the site: site/index.html"

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv/installed-dev: pyproject.toml .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
