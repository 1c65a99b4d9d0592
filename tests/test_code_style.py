"""Import layers and code limits, and that what is shipped can be installed and run."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache, partial
from pathlib import Path

import pytest

import demur
from demur.attacks import APGD, autoattack
from tests import forked
from tests.conftest import TINIEST, Command
from tests.test_audit_grades import few_games

PACKAGE = Path(demur.__file__).parent
ROOT = PACKAGE.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
LAYERS = [
    [
        "errors", "version", "distributed", "numerics", "noise", "images", "progress", "output",
    ],
    ["spec", "files", "metrics"],
    ["data", "nets"],
    ["rejectors"],
    ["attacks", "calibrate"],
    ["methods"],
    ["recipes"],
    ["runs", "engine"],
    ["evaluate"],
    ["sanity"],
    ["training", "guards"],
    ["report", "serve", "audits"],
    ["verification"],
    ["leaderboard"],
    ["cli"],
    ["paper"],
]  # fmt: skip
LAYER = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """The nodes of a file; the first is the module."""
    return list(ast.walk(ast.parse(path.read_text())))


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_packages(path: Path) -> set[str]:
    """The packages of demur that a file imports from."""
    packages = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("demur"):
            parts = node.module.split(".")
            packages |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("demur.")]
            packages |= {name.split(".")[1] for name in names}
    return packages


def test_every_package_has_a_layer() -> None:
    packages = {package_of(path) for path in SOURCES} - {"__init__", "__main__"}
    assert packages == set(LAYER)


def test_imports_go_down() -> None:
    upward = []
    for path in SOURCES:
        package = package_of(path)
        if package in ("__init__", "__main__"):
            continue
        for other in imported_packages(path) - {package}:
            both_lowest = LAYER[other] == LAYER[package] == 0
            if LAYER[other] >= LAYER[package] and not both_lowest:
                upward.append(f"{path.relative_to(PACKAGE)} imports {other}")
    assert upward == []


def test_the_lowest_layer_has_no_cycles() -> None:
    needs = {package: imported_packages(PACKAGE / f"{package}.py") for package in LAYERS[0]}
    built: set[str] = set()
    while len(built) < len(needs):
        ready = {package for package, wants in needs.items() if wants <= built} - built
        assert ready, f"a cycle among {set(needs) - built}"
        built |= ready


def imported_files(path: Path) -> set[Path]:
    """The files of the package that a file imports, at its top or inside a function."""

    def file_of(module: str) -> Path | None:
        place = ROOT / module.replace(".", "/")
        found = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        return found if module.startswith("demur") and found.is_file() else None

    modules = []
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules += [name if file_of(name) else node.module for name in names]
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    return {found for module in modules if (found := file_of(module))} - {PACKAGE / "__init__.py"}


def test_no_files_import_each_other_in_a_cycle() -> None:
    remaining = {path: imported_files(path) for path in SOURCES}
    while ready := [path for path, needs in remaining.items() if not needs & remaining.keys()]:
        for path in ready:
            del remaining[path]
    assert [path.relative_to(PACKAGE).as_posix() for path in remaining] == []


def test_files_and_functions_are_short_and_described() -> None:
    faults = []
    for path in SOURCES:
        text, name = path.read_text(), path.relative_to(PACKAGE)
        (tree, *_) = nodes(path)
        assert isinstance(tree, ast.Module)
        doc = ast.get_docstring(tree) or ""
        if len(text.splitlines()) > 500 or not 0 < len(doc.splitlines()) <= 8:
            faults.append(f"{name}: over 500 lines, or a docstring of none or over 8 lines")
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                end = node.end_lineno or node.lineno
                code = node.body[1:] if ast.get_docstring(node) else node.body
                if end - node.lineno >= 60 or (code and end - code[0].lineno >= 40):
                    faults.append(f"{name}: {node.name} is too long")
    assert faults == []


HABITS = {
    r"(?<![.\w])print\(": "print",
    r"\.cuda\(": ".cuda()",
    r"\bimport pickle|torch\.load\(|allow_pickle=True": "pickle",
    r"(?<![.\w])(eval|exec)\(": "eval of text",
    r"(torch|np\.random)\.(manual_)?seed\(": "the global generator",
    r"np\.random\.(rand|randn|permutation|shuffle)\(": "the global generator",
    r"\bConsole\(": "a console of its own",
}
ALLOWED = {
    ("nets/net.py", "the global generator"),  # inside fork_rng: layers know no other
    ("report/terminal.py", "a console of its own"),  # both read no markup in names
    ("cli/progress.py", "a console of its own"),
    ("audits/model_loading.py", "pickle"),  # torch.load of weights only
    ("data/cifar.py", "pickle"),  # of the published bytes alone, and of arrays alone
}


def test_no_bad_habits() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), habit)
        for path in SOURCES
        for pattern, habit in HABITS.items()
        if re.search(pattern, path.read_text())
    }
    assert found <= ALLOWED, found - ALLOWED


def test_numpy_packages_import_no_torch() -> None:
    paths = [*(PACKAGE / "metrics").glob("*.py"), *(PACKAGE / "calibrate").glob("*.py")]
    for path in paths:
        assert "torch" not in path.read_text()


def test_vocabulary_names_are_unique() -> None:
    from demur.recipes import _LISTS, VOCABULARY

    assert len(VOCABULARY) == sum(len(group) for group in _LISTS)


def readme_commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_the_readme_shows_the_two_commands_and_the_tour() -> None:
    commands = readme_commands()
    assert "make demo" in commands
    assert "make test" in commands
    assert sum(c.startswith("demur ") for c in commands) >= 6


def test_the_readmes_commands_and_code_run(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    few_digits: None,
) -> None:  # fmt: skip
    """Every demur command of the README in order, with short attacks, then its Python."""
    for line in readme_commands():
        program, *words = line.split()
        if program != "demur" or words == ["demo"]:  # the demo runs from the wheel
            continue
        if words[0] == "attack":
            words = ["adaptive:steps=5" if word == "adaptive" else word for word in words]
            words += ["--n", "16"]
        if words[0] == "train":
            words += [*TINIEST, "--out", f"runs/{words[1]}"]
        code, _, said = command(*words)
        # a net that hardly learned keeps no promise, and says so
        honest = words[0] == "calibrate" and "no threshold gives" in said
        assert code == 0 or honest, f"{line}\n{said}"
    monkeypatch.setattr(autoattack, "APGD", partial(APGD, steps=10))
    monkeypatch.setattr(autoattack, "MaxMinMargin", few_games)
    for text in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S):
        exec(compile(text, "README.md", "exec"), {})
    told = capsys.readouterr().out
    found = re.search(r"accepted wrong +(\d+)  .*\]  +(\d+)  ", told)
    assert found is not None, told
    assert int(found[2]) > int(found[1]), "the attack finds accepted errors"


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def git_files(*options: str) -> list[Path]:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs a git checkout and git")
    listed = subprocess.run(
        ["git", "ls-files", "-z", *options], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_large_files_in_the_checkout() -> None:
    files = [path for path in git_files() if path.exists() and "zoo" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 30e6  # test_zoo_nets.py has the zoo's limit


def test_git_ignores_no_source() -> None:
    ignored = git_files("--others", "--ignored", "--exclude-standard", "demur", "tests", "docs")
    assert [path for path in ignored if "__pycache__" not in path.parts] == []


SHORT_DEMO = """
import dataclasses, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "demur"]:
    del sys.modules[name]  # the fork server's, from the checkout
import demur.__main__
from demur.data import Digits
from demur.recipes import attacks
load = Digits.load
Digits.load = lambda *words: {name: part.first(150) for name, part in load(*words).items()}
print(demur.__main__.__file__, file=sys.stderr)
for name in ("pgd-20", "adaptive"):
    make = attacks._SETTINGS[name]
    attacks._SETTINGS[name] = lambda recipe, make=make: dataclasses.replace(make(recipe), steps=2)
demur.__main__.main()
"""


def test_the_demo_runs_from_a_built_wheel(tmp_path: Path) -> None:
    """The wheel holds everything the demo needs, templates too; its last screen is small."""
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    subprocess.run(
        [sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True, timeout=200
    )
    (wheel,) = tmp_path.glob("demur-*-py3-none-any.whl")
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as content:
        content.extractall(target)  # as pip installs a wheel of Python files
    (metadata,) = target.glob("demur-*.dist-info")
    assert "demur = demur.__main__:main" in (metadata / "entry_points.txt").read_text()
    shipped = {
        p.relative_to(target / "demur") for p in (target / "demur").rglob("*") if p.is_file()
    }
    here = {p.relative_to(PACKAGE) for p in PACKAGE.rglob("*") if p.is_file()}
    needed = {p for p in here if "__pycache__" not in p.parts}
    assert needed <= shipped, needed - shipped
    env = os.environ | {"PYTHONPATH": str(target)}
    done = forked.run(["-c", SHORT_DEMO, "demo", "--epochs", "1", "--device", "cpu"], tmp_path, env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(str(target))
    screen = done.stdout.splitlines()
    assert any("ertificate" in line for line in screen)  # or why there is none
    assert len(screen) <= 30
    assert max(map(len, screen)) <= 80
    assert (tmp_path / "runs/demo/report.html").stat().st_size > 50_000
