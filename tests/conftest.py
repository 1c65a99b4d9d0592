"""Settings that tests share; `tests/fixtures.py` has the fixtures."""

import gc
from collections.abc import Callable

import pytest

from tests.samples import EXHAUSTIVE, mark_long_versions, note_result, samples

__all__ = ["samples"]
Answer = tuple[int, str, str]
Command = Callable[..., Answer]
TINY = ["epochs=6", "width=4", "attack.steps=3", "validation_attack.steps=3", "attack.eps=0.1"]
TINIEST = ["epochs=1", "width=4", "attack.steps=1", "validation_attack.steps=1"]  # of any recipe
STUDY = ("paper", "study", "recipes")  # a command that compares recipes
FEW = 150  # images: two whole batches of 64 and a part of one


SLOWEST = ("test_docs", "test_code_style", "test_paper_tables", "test_explorer", "test_distributed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first: none of them is left to one worker at the end."""
    mark_long_versions(items)
    items.sort(key=lambda item: item.path.stem not in SLOWEST)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the long versions for docs/exhaustive.md."""
    if EXHAUSTIVE:
        note_result(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Load the fixtures, which import torch; a process that only starts workers needs none.

    By now pytest-cov counts lines, also those of imports.
    """
    config = session.config
    starts_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not starts_workers:
        gc.disable()  # imports make no garbage, but half a million objects to search
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but not among what was imported."""
    gc.freeze()
    gc.enable()
