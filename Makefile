# make demo: train, attack and report on the embedded digits. make test: lint, types and tests.
# make coverage: the tests with line coverage, at least 92%.
# make docs: build the documentation into site/. Each target sets up .venv by itself.

.PHONY: demo test coverage docs clean
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check --quiet -c constraints.txt

demo: $(VENV)/demo.stamp
	$(PY) -m demur demo --device cpu

test: $(VENV)/test.stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -q -rs

coverage: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -q --cov --cov-report=term

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "documentation: $(CURDIR)/site/index.html"

clean:
	rm -rf $(VENV) build dist site *.egg-info runs/demo

$(VENV)/made.stamp:
	@sh tools/find-python.sh $(VENV)
	@touch $@

$(VENV)/demo.stamp: $(VENV)/made.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[report]'
	@touch $@

$(VENV)/docs.stamp: $(VENV)/made.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[docs]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/made.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps torchattacks
	@touch $@ $(VENV)/demo.stamp $(VENV)/docs.stamp
