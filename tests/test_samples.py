"""Which tests have a long version, and that `make exhaustive` runs it."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[1]
CONFTEST = """
import pytest
from tests.samples import mark_long_versions, samples

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_long_versions(items)
"""
TESTS = """
import os
import pytest
from hypothesis import given, settings, strategies as st
from tests.samples import examples

def test_sampled(samples):
    assert samples(3, 1000) == int(os.environ["EXPECTED"])

@pytest.mark.exhaustive
def test_marked():
    pass

@pytest.mark.skipif(not os.environ.get("DEMUR_EXHAUSTIVE"), reason="long: make exhaustive")
def test_skipped():
    pass

@given(st.integers())
@settings(max_examples=examples(1))
def test_property(value):
    pass

def test_ordinary():
    pass
"""


@pytest.mark.parametrize(
    ("scale", "expected", "outcomes"),
    [
        ("", 3, {"passed": 3, "skipped": 2}),
        ("0.5", 500, {"passed": 4, "deselected": 1}),
    ],
)
def test_long_versions_run_where_asked_for(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    scale: str,
    expected: int,
    outcomes: dict[str, int],
) -> None:
    monkeypatch.setenv("DEMUR_EXHAUSTIVE", scale)
    monkeypatch.setenv("EXPECTED", str(expected))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers = exhaustive: long\naddopts = --strict-markers")
    pytester.makepyfile(TESTS)
    words = ["-p", "no:schemathesis", "-p", "no:cacheprovider"]
    result = pytester.runpytest_subprocess(*words, *(["-m", "exhaustive"] if scale else []))
    result.assert_outcomes(**outcomes)
