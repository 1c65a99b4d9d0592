"""The locks in requirements/ fit pyproject.toml, are complete, and are what make installs."""

import os
import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {  # and the locks that they need
    "report": ("core", "demo"), "serve": ("core", "serve"),
    "dev": ("core", "demo", "serve", "test"),
}  # fmt: skip
NO_DEPS = "torchattacks"  # locked without its dependencies, old versions that it pins
TORCH_ONLY = ("nvidia-", "cuda-", "triton")
ENVIRONMENTS = [
    {"python_version": python, "python_full_version": f"{python}.1", "platform_machine": machine,
     "sys_platform": "linux", "platform_system": "Linux", "extra": ""}
    for python in ("3.11", "3.12", "3.13") for machine in ("x86_64", "aarch64")
]  # fmt: skip
Pins = dict[str, Version]


def entries(name: str) -> list[Requirement]:
    """The packages of a lock; each must be pinned and have a hash."""
    lines = (FOLDER / f"{name}.lock").read_text().splitlines()
    found = []
    for entry in re.split(r"\n(?=\w)", "\n".join(x for x in lines if not x.startswith("#"))):
        words, *hashes = entry.split("\\\n")
        assert hashes, f"{words}: no hash"
        assert all(re.fullmatch(r" +--hash=sha256:[0-9a-f]{64} ?", one) for one in hashes), entry
        found.append(Requirement(words))
        assert [one.operator for one in found[-1].specifier] == ["=="], words
    return found


def pins(environment: dict[str, str], *names: str) -> Pins:
    """The versions that locks install in an environment."""
    found: Pins = {}
    for one in (one for name in names for one in entries(name)):
        if one.marker is None or one.marker.evaluate(environment):
            key = canonicalize_name(one.name)
            assert key not in found, f"{key} twice in {names}"
            found[key] = Version(next(iter(one.specifier)).version)
    return found


def requirements(extra: str) -> list[Requirement]:
    """What the package needs with an extra, also with the extras that it names."""
    groups = PROJECT["project"]["optional-dependencies"]
    found, waiting, seen = list(PROJECT["project"]["dependencies"]), [extra], set[str]()
    while waiting:
        seen.add(one := waiting.pop())
        for text in groups[one]:
            inner = Requirement(text)
            if inner.name == "demur":
                waiting += inner.extras - seen
            else:
                found.append(text)
    return [Requirement(text) for text in (*found, *PROJECT["build-system"]["requires"])]


@pytest.mark.skipif(os.environ.get("DEMUR_VERSIONS") != "oldest", reason="make test-oldest")
def test_the_oldest_versions_are_installed() -> None:
    """A bound that others never let come true is not tested by `make test-oldest`."""
    for need in requirements("dev"):
        (bound,) = need.specifier
        lowest, installed = Version(bound.version), Version(distribution(need.name).version)
        assert installed.release[:2] == (*lowest.release, 0)[:2], (str(need), str(installed))


@pytest.mark.parametrize("torch", ["torch", "torch-cpu"])
@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_satisfies_pyproject_on_every_platform(name: str, torch: str) -> None:
    for environment in ENVIRONMENTS:
        locked = pins(environment, *EXTRAS[name], torch)
        for need in requirements(name):
            version = locked.get(canonicalize_name(need.name))
            assert version is not None and need.specifier.contains(version), (need, version)


def test_a_lock_holds_all_that_its_packages_need() -> None:
    """By the metadata of the packages that are installed here in the locked version."""
    environment = {key: str(value) for key, value in default_environment().items()} | {"extra": ""}
    locked, seen = pins(environment, *EXTRAS["dev"], "torch"), 0
    for name, version in locked.items():
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        if Version(installed.version).public != version.public or name == NO_DEPS:
            continue
        seen += 1
        for need in map(Requirement, installed.requires or []):
            if need.marker is None or need.marker.evaluate(environment):
                held = locked.get(canonicalize_name(need.name))
                assert held and need.specifier.contains(held, prereleases=True), (name, need, held)
    if seen < 100:
        pytest.skip(f"only {seen} packages are installed in the locked version")


def test_locks_agree_and_name_no_index() -> None:
    for environment in ENVIRONMENTS:
        pins(environment, *EXTRAS["dev"])  # no package is in two locks
        torch = pins(environment, "torch")
        others = [one for one in torch if not one.startswith(TORCH_ONLY)]
        assert others == ["torch"]
        assert f"torch=={torch['torch']}" in (ROOT / "constraints.txt").read_text().splitlines()
        assert pins(environment, "torch-cpu") == {"torch": Version(f"{torch['torch']}+cpu")}
    for path in FOLDER.iterdir():
        assert not re.search(r"://|--(extra-)?index|--find-links", path.read_text()), path.name


def test_make_and_docker_install_the_locks() -> None:
    """Each pip install is of a lock, or without dependencies."""
    for file, used in (
        ("Makefile", ("core demo", "core demo serve test")),
        ("Dockerfile", ("core", "serve")),
    ):
        text = (ROOT / file).read_text()
        assert all(f"install,{name}" in text or f"{name}.lock" in text for name in used), file
        installs = [
            one
            for one in re.findall(r".*(?:pip install|\(PIP\)) .*", text)
            if not one.startswith("PIP :=") and ".venv-$*" not in one
        ]  # test-oldest
        assert len(installs) == 2, installs
        assert all("--no-deps" in line for line in installs), installs
        assert "--require-hashes" in installs[0], installs
