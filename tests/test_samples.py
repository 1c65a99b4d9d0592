"""Which tests have a long version, and that `make exhaustive` runs it."""

import json
import sys
from pathlib import Path
from subprocess import run

import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[1]
CONFTEST = """
from pathlib import Path
import pytest
from tests.samples import mark_long_versions, note_result, samples

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_long_versions(items)

def pytest_runtest_logreport(report):
    note_result(report, Path("results.jsonl"))
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
    [("", 3, {"passed": 3, "skipped": 2}), ("0.5", 500, {"passed": 4, "deselected": 1})],
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
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers = exhaustive: long\naddopts = --strict-markers")
    pytester.makepyfile(TESTS)
    words = ["-p", "no:schemathesis", "-p", "no:cacheprovider"]
    result = pytester.runpytest_subprocess(*words, *(["-m", "exhaustive"] if scale else []))
    result.assert_outcomes(**outcomes)
    if scale:
        check_page(pytester.path)


def check_page(folder: Path) -> None:
    """The report of the long versions: those that ended, and those that did not run."""
    name = "test_long_versions_run_where_asked_for"
    results, listed, page = (folder / one for one in ("results.jsonl", "listed.txt", "page.md"))
    lines = results.read_text().splitlines()
    assert len(lines) == 4
    failed = json.loads(lines[0]) | {"test": "tests/a.py::test_a", "outcome": "failed", "scale": 1}
    results.write_text("\n".join([json.dumps(failed), *lines, '{"test": "cut']))
    tests = [f"{name}.py::test_{one}" for one in ("sampled", "marked", "skipped", "property")]
    listed.write_text("\n".join([*tests, "tests/a.py::test_b", "5 tests collected"]))
    tool = ROOT / "tools" / "exhaustive_report.py"
    words = [sys.executable, *map(str, (tool, results, listed, page))]
    assert run(words, check=False).returncode == 0
    listed.write_text("\n".join([*tests, "tests/a.py::test_a", "tests/a.py::test_b"]))
    page.write_text("kept\n" + page.read_text())
    assert run(words, check=False).returncode == 1  # a test failed
    text = page.read_text()
    assert text.startswith("kept\n") and text.count("## Results") == 1
    assert "6 tests have a long version: 4 passed, 1 failed, 0 skipped, 1 not" in text
    assert f"| `{name}.py::test_sampled` | 500 | 0 | 1 passed, 0.5 of the samples |" in text
    assert "| `a.py::test_a` | 500 | 0 | 1 failed | " in text
    assert "| `a.py::test_b` |  | 0 | 1 not run |  |" in text
