# make demo: the main job on embedded data. make test: every check. Both start from nothing.

.PHONY: demo test clean
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check --quiet -c constraints.txt

demo: $(VENV)/demo.stamp
	$(PY) -m demur demo --device cpu

test: $(VENV)/test.stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -q -rs

clean:
	rm -rf $(VENV) build dist *.egg-info runs/demo

$(VENV)/made.stamp:
	@sh tools/find-python.sh $(VENV)
	@touch $@

$(VENV)/demo.stamp: $(VENV)/made.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[report]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/made.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps torchattacks
	@touch $@ $(VENV)/demo.stamp
