"""A release: one version, files that hold what they must, and an installation without extras."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import demur

ROOT = Path(__file__).parents[1]
PACKAGE = Path(demur.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ["3.11", "3.12", "3.13"]
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # a build changes sys.argv
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""
# An installation without scipy and scikit-learn. None in sys.modules fails an import.
LIGHT = """
import sys
from importlib import import_module, metadata, util
from pkgutil import walk_packages

absent = {"scipy", "sklearn", "matplotlib"}
version = metadata.version
gone = {*absent, "scikit-learn"}  # no package has the name "none"
metadata.version = lambda name: version("none" if name in gone else name)
real = util.find_spec
util.find_spec = lambda name, *more: None if name in absent else real(name, *more)
sys.modules |= dict.fromkeys(absent)  # None: the import fails
import demur
exec("from demur import *")
import numpy as np
from demur.data.corruptions import corrupt
for module in walk_packages(demur.__path__, "demur."):
    if module.name != "demur.__main__":
        import_module(module.name)
assert len(Digits().load()["test"]) == 300
assert certify_threshold(np.arange(500.0), np.arange(500) > 100, Risk(0.05)).n == 400
assert import_module("demur.runs").provenance(import_module("torch").device("cpu"))["numpy"]
image = np.zeros((1, 32, 32, 3), np.uint8)
try:
    corrupt(image, "glass_blur", 1, [0])
except demur.BadInput as error:
    print(error)
"""


def test_the_version_is_the_same_everywhere() -> None:
    named = {
        "CITATION.cff": r"^version: (\S+)$",
        "CHANGELOG.md": r"^## (\S+)",
        "docs/cite.md": r"version = \{(\S+)\}",
        "conda/meta.yaml": r'set version = "(\S+)"',
    }
    for file, pattern in named.items():
        found = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
        assert found and found[1] == demur.__version__, file
    assert "version" in PROJECT["dynamic"]


def test_every_extra_that_a_text_names_exists() -> None:
    texts = [*PACKAGE.rglob("*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")]
    named = {
        extra
        for path in texts
        for group in re.findall(r"\bdemur\[([\w,-]+)\]", path.read_text())
        for extra in group.split(",")
    }
    assert {"corruptions", "sklearn", "report"} <= named
    assert named <= PROJECT["optional-dependencies"].keys()


def test_without_scipy_and_scikit_learn_only_their_own_features_are_missing() -> None:
    command = [sys.executable, "-c", LIGHT]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "corruptions need SciPy; install it with pip install 'demur[corruptions]'"
    ]


def test_the_conda_recipe_needs_what_the_package_needs() -> None:
    text = (ROOT / "conda/meta.yaml").read_text()
    run = text.split("  run:\n")[1].split("\n\n")[0]
    conda = {line.strip("- ").replace(" ", "") for line in run.splitlines()}
    pip = {one.replace("torch", "pytorch") for one in PROJECT["dependencies"]}
    assert conda == {*pip, f"python{PROJECT['requires-python']}"}


def test_the_release_is_tested_on_every_python_that_it_names() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == PYTHONS
    assert jobs["publish"]["needs"] == ["build", "test"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    stated = [one.split(" :: ")[-1] for one in PROJECT["classifiers"] if ":: Python :: 3." in one]
    assert stated == PYTHONS


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel, built from a copy of the sources."""
    folder, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, source / "demur", ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    command = [sys.executable, "-c", BUILD, str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=200)
    return folder


def test_the_sdist_holds_what_a_build_needs_and_no_results(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    package = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    needed = package | {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "CITATION.cff"}
    assert needed <= names, needed - names
    assert not {name.split("/")[0] for name in names} & {"tests", "results", "docs", "zoo"}


def test_the_wheel_holds_the_package_and_its_licences_only(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        names = archive.namelist()
    info = f"demur-{demur.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"demur", info}
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"} <= set(names)
