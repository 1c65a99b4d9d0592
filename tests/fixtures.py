"""One small trained net for the whole test run, and linear nets with known distances."""

import os
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import typer.main
from hypothesis import HealthCheck, settings
from torch import Tensor

from demur.attacks import PGD, Clean
from demur.attacks.balls import Linf
from demur.cli.commands import app, main
from demur.data import Digits, Images, Splits
from demur.evaluate import LoadedRun, run_attack
from demur.guards import Guard, guard
from demur.nets import RejectingNet
from demur.paper.commands import add_to
from demur.paper.comparisons import COMPARISONS
from demur.recipes import Recipe, attacks, recipe
from demur.recipes.training import linf
from demur.runs import Run
from demur.training import train
from tests.conftest import FEW, TINY, Answer, Command
from tests.quick_net import QuickNet, trained_quick_net
from tests.samples import examples

# a busy machine is slow, not wrong
settings.register_profile(
    "demur", deadline=None, max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("demur")

add_to(app)
# typer makes its parsers for every call, which takes longer than most wrong command lines
vars(typer.main)["get_command"] = cache(typer.main.get_command)


_trace: Any = None  # the trace function of a coverage measurement


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Go on measuring coverage after a library has removed the trace function."""
    global _trace  # noqa: PLW0603
    _trace = _trace or sys.gettrace()
    if _trace is not None and sys.gettrace() is None:
        sys.settrace(_trace)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """As in `pytest_runtest_setup`: the set-up of a fixture may have used such a library."""
    pytest_runtest_setup()


@pytest.fixture(autouse=True, scope="session")
def no_fsync() -> Iterator[None]:
    """Files of tests need not outlive a power failure, and a busy disk takes long to sync."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def onednn_stays_enabled() -> Iterator[None]:
    """Enable oneDNN again: torch disables it where a CPU without bf16 fails at a bf16 product.

    Later tests would compare results of its kernels with those of others, up to rounding.
    """
    yield
    torch.backends.mkldnn.set_flags(True)


@pytest.fixture(scope="session")
def tiny_recipe() -> Recipe:
    return recipe("digits-pgdat-rr", TINY)


def made_once(name: str, factory: pytest.TempPathFactory, make: Callable[[Path], object]) -> Run:
    """Return a run that the first worker of pytest-xdist makes; each worker has a copy."""
    import fcntl

    own, base = factory.mktemp(name) / "run", factory.getbasetemp().parent
    if "PYTEST_XDIST_WORKER" not in os.environ:
        make(own)
        return Run(own)
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / f"{name}.done").exists():
            make(base / name)
            (base / f"{name}.done").touch()
    return Run(Path(copytree(base / name, own)))


@pytest.fixture(scope="session")
def tiny_run(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A digits run trained for a few seconds; treat it as read-only."""
    return made_once("tiny", tmp_path_factory, lambda folder: train(tiny_recipe, folder))


@pytest.fixture(scope="session")
def tiny_source(tiny_run: Run) -> LoadedRun:
    return LoadedRun(tiny_run, torch.device("cpu"))


@pytest.fixture
def own_source(tiny_run: Run, tmp_path: Path) -> LoadedRun:
    """A copy of the tiny run that records may be written into."""
    copytree(tiny_run.path, tmp_path / "own")
    return LoadedRun(Run.open(str(tmp_path / "own")), torch.device("cpu"))


@pytest.fixture(scope="session")
def tiny_net(tiny_source: LoadedRun) -> RejectingNet:
    return tiny_source.net


@pytest.fixture(scope="session")
def shared_quick_net() -> QuickNet:
    return trained_quick_net()


@pytest.fixture
def quick_net(shared_quick_net: QuickNet) -> QuickNet:
    return deepcopy(shared_quick_net)  # other libraries leave gradients in its parameters


@pytest.fixture(scope="session")
def tiny_guard(tiny_source: LoadedRun) -> Guard:
    """The tiny net with R-Con calibrated on the cal images, which rejects some."""
    x, y = tiny_source.splits["cal"].batch(slice(None))
    made = tiny_source.run.recipe
    return guard(
        tiny_source.net, x, y, rejector="RCon", coverage=0.7, eps=0.15,
        built_from=(made.net, made.method.head),
    )  # fmt: skip


@pytest.fixture(scope="session")
def onnx_file(tiny_guard: Guard, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guard as an ONNX file, alone in its folder; treat it as read-only."""

    def make(folder: Path) -> None:
        folder.mkdir()
        tiny_guard.export_onnx(folder / "model.onnx")

    return made_once("onnx", tmp_path_factory, make).path / "model.onnx"


@pytest.fixture(scope="session")
def test_images(tiny_source: LoadedRun) -> Images:
    return tiny_source.splits["test"]


@pytest.fixture
def batch(test_images: Images) -> tuple[Tensor, Tensor]:
    return test_images.batch(slice(0, 24))


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


@pytest.fixture
def command(
    in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Call the command as the shell would; exit code, stdout, stderr."""

    def call(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["demur", *words])
        monkeypatch.setenv("COLUMNS", "200")
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def quick_table(few_digits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of methods on few images, under attacks that take no time."""
    quick = replace(COMPARISONS["methods-digits"], attacks=("clean", "pgd-20", "pgd-10:steps=1"))
    monkeypatch.setitem(COMPARISONS, "methods-digits", quick)
    monkeypatch.setitem(attacks._SETTINGS, "pgd-20", lambda run: linf(run.data, 2))


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits of which only a few are loaded."""
    load = Digits.load

    def few(self: Digits, folder: Path | None = None) -> Splits:
        return {
            name: images.first(min(FEW, len(images))) for name, images in load(self, folder).items()
        }

    monkeypatch.setattr(Digits, "load", few)


@pytest.fixture(scope="session")
def scored_run(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A copy of the shared run with two records; treat it as read-only."""

    def make(folder: Path) -> None:
        loaded = LoadedRun(Run(Path(copytree(tiny_run.path, folder))), torch.device("cpu"))
        run_attack(loaded, "clean", Clean())
        run_attack(loaded, "pgd-3", PGD(Linf(0.15), steps=3))

    return made_once("scored", tmp_path_factory, make)


@pytest.fixture(scope="module")
def scored_source(scored_run: Run, tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    """A copy of the shared run with two records, for the tests of one file."""
    copy = copytree(scored_run.path, tmp_path_factory.mktemp("scored") / "run")
    return LoadedRun(Run(Path(copy)), torch.device("cpu"))
