# make demo: train, attack and report on the embedded digits. make test: lint, types and tests.
# make coverage: the tests with line coverage, at least 95%.
# make exhaustive: the long versions of the tests, hours; adds to docs/exhaustive.md.
# make test-oldest, make test-newest: the tests with the oldest and newest versions that
# pyproject.toml allows. make lock: write requirements/*.lock again, with the newest versions.
# make docs: build the documentation into site/. Each target sets up its .venv by itself.

.PHONY: demo test coverage exhaustive test-oldest test-newest lock docs clean
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check --quiet
LOCKED := $(PIP) --no-deps --only-binary :all: --require-hashes
DEMUR_EXHAUSTIVE ?= 1
LOCKS := $(wildcard requirements/*.lock)
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -q

# Install torch, its CPU build where pip finds one, then the locks $(1) and this package.
define install
	@$(LOCKED) -r requirements/torch-cpu.lock 2>/dev/null || { \
	  echo "no CPU build of torch on pip's indexes; installing the default one"; \
	  $(LOCKED) -r requirements/torch.lock; }
	$(LOCKED) $(patsubst %,-r requirements/%.lock,$(1))
	$(PIP) --no-deps --no-build-isolation -e .
endef

demo: $(VENV)/demo.stamp
	$(PY) -m demur demo --device cpu

# mypy runs while tests wait for files and other processes. Without messages of failed asserts
# pytest starts earlier; tests that failed run again with them, and fail if they fail again.
# What mypy said comes last, and why the target failed.
test: $(VENV)/test.stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@mkdir -p build
	@nice -n 19 $(PY) -m mypy > build/mypy.txt 2>&1 & types=$$!; tests=0; \
	$(PYTEST) -rs --assert=plain || { echo "again, what failed:"; $(PYTEST) --lf || tests=$$?; }; \
	wait $$types; types=$$?; cat build/mypy.txt; \
	echo "exit codes: $$tests of pytest, failed tests run twice, $$types of mypy"; \
	[ $$tests = 0 ] && [ $$types = 0 ]

coverage: $(VENV)/test.stamp
	$(PYTEST) --cov --cov-report=term

# Each test that ends is noted in build/exhaustive.jsonl; make clean forgets them.
exhaustive: $(VENV)/test.stamp
	@mkdir -p build
	DEMUR_EXHAUSTIVE=1 $(PY) -m pytest --collect-only -q -m exhaustive > build/exhaustive.txt
	DEMUR_EXHAUSTIVE=$(DEMUR_EXHAUSTIVE) $(PYTEST) -m exhaustive || true
	$(PY) tools/exhaustive_report.py build/exhaustive.jsonl build/exhaustive.txt docs/exhaustive.md

# fsspec, which torch and datasets need, would leave only the newest datasets; uv, which is there
# already, would stay the newest.
test-oldest: RESOLUTION := lowest-direct 'datasets<4'
test-newest: RESOLUTION := highest
test-oldest test-newest: test-%:
	@sh tools/find-python.sh .venv-$*
	.venv-$*/bin/python -m pip install --disable-pip-version-check --quiet uv
	.venv-$*/bin/uv pip install --quiet --python .venv-$* --reinstall-package uv \
	  --resolution $(RESOLUTION) -e '.[dev]'
	.venv-$*/bin/uv pip install --quiet --python .venv-$* --no-deps torchattacks
	.venv-$*/bin/uv pip list --python .venv-$*
	DEMUR_VERSIONS=$* OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest -n 2 --dist worksteal -q -rs

lock: $(VENV)/test.stamp
	$(PY) tools/lock.py --upgrade

docs: $(VENV)/test.stamp
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "documentation: $(CURDIR)/site/index.html"

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build dist site *.egg-info runs/demo

$(VENV)/made.stamp:
	@sh tools/find-python.sh $(VENV)
	@touch $@

$(VENV)/demo.stamp: $(VENV)/made.stamp pyproject.toml $(LOCKS)
	$(call install,core demo)
	@touch $@

$(VENV)/test.stamp: $(VENV)/made.stamp pyproject.toml $(LOCKS)
	$(call install,core demo serve test)
	@touch $@ $(VENV)/demo.stamp
