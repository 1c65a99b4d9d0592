"""The documentation site builds strictly, lists every public name, and its examples run."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

import demur
from demur.attacks import APGD, FAB, Square, autoattack
from tests import forked
from tests.test_audit_grades import few_games

ROOT = Path(demur.__file__).parents[1]
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
TO_RUN = re.compile(r"<!-- run -->\n```python\n(.*?)```", re.S)
BUILD = """
import gc, mkdocs.__main__, pymdownx.highlight
from material.plugins.search.plugin import SearchIndex
pymdownx.highlight.pygments = False  # no colours
gc.disable()  # little is garbage
SearchIndex.add_entry_from_context = lambda *words: None  # its index is no page
mkdocs.__main__.cli()
"""
LONGEST_CODE = 80  # characters: a code block has 656 pixels in a window of 1,280, a character 8.2
TARGETS = {"a": "href", "img": "src", "script": "src", "link": "href"}


class Page(HTMLParser):
    """The anchors of a built page and the targets of its links, images, scripts and styles."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str]] = []
        self.code: list[str] = []
        self.open: list[str] = []  # code blocks and source listings around the current text
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag in TARGETS and (target := values.get(TARGETS[tag])):
            self.links.append((tag, target))
        if tag in ("pre", "details"):  # a listing of source code has smaller letters
            self.open.append(tag)
            self.code.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("pre", "details"):
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open == ["pre"]:
            self.code[-1] += data


def test_the_site_builds_strictly_with_every_name_and_no_broken_link(tmp_path: Path) -> None:
    pages = built_pages(tmp_path / "site")
    assert unlisted_names(pages) == []
    assert list(broken_links(pages)) == []
    assert list(requests_to_other_hosts(pages)) == []
    assert unlisted_commands(pages) == []
    assert list(clipped_code(pages)) == []
    assert (tmp_path / "site" / "search" / "search_index.js").is_file(), "search from disk"


def built_pages(site: Path) -> dict[Path, Page]:
    """Every page of the site, built without a network into a temporary folder."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed; pip install -e '.[docs]'")
    build = ["-c", BUILD, "build", "--strict", "--quiet", "-d", str(site)]
    done = forked.run(build, ROOT, os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def unlisted_names(pages: dict[Path, Page]) -> list[str]:
    """The public names that no reference page documents."""
    reference = [page for path, page in pages.items() if path.parent.name == "reference"]
    anchors = set().union(*(page.anchors for page in reference))
    return [name for name in demur.__all__ if f"demur.{name}" not in anchors]


def broken_links(pages: dict[Path, Page]) -> Iterator[str]:
    """Links to files that are not in the site, or to anchors that are not on their page."""
    for path, page in pages.items():
        for _, link in page.links:
            target, anchor = urldefrag(unquote(link))
            if ":" in target:
                continue
            file = (path.parent / target).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file():
                yield f"{path.name} links to {link}"
            elif anchor and file in pages and anchor not in pages[file].anchors:
                yield f"{path.name} links to {link}, which has no such anchor"


def requests_to_other_hosts(pages: dict[Path, Page]) -> Iterator[str]:
    """Images, scripts and styles that a reader's browser would load from elsewhere."""
    for path, page in pages.items():
        for tag, link in page.links:
            if tag != "a" and re.match(r"(https?:)?//", link):
                yield f"{path.name} loads {link}"


def clipped_code(pages: dict[Path, Page]) -> Iterator[str]:
    """Lines of code that a window of 1,280 pixels does not show whole."""
    for path, page in pages.items():
        for line in (line for block in page.code for line in block.splitlines()):
            if len(line) > LONGEST_CODE:
                yield f"{path.name}, {len(line)} characters: {line}"


def unlisted_commands(pages: dict[Path, Page]) -> list[str]:
    """The commands without a section in the command-line reference."""
    from typer.main import get_command

    from demur.cli.commands import app

    (page,) = [page for path, page in pages.items() if path.name == "cli.html"]
    names = list(_command_names(get_command(app), "demur"))
    assert len(names) > 15
    assert "demur-paper-study-theory" in names
    return [name for name in names if name not in page.anchors]


def _command_names(group: Any, above: str) -> Iterator[str]:
    """The names of all commands below a group, joined by hyphens."""
    for name, command in getattr(group, "commands", {}).items():
        yield re.sub(r"[-\s]+", "-", f"{above}-{name}")
        yield from _command_names(command, f"{above}-{name}")


@pytest.mark.parametrize(
    "path", [page for page in PAGES if TO_RUN.search(page.read_text())], ids=lambda path: path.stem
)
def test_the_examples_of_a_guide_run(
    path: Path, in_empty_folder: Path, few_digits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All marked blocks of a page, in one namespace, with few images and short ensembles."""
    monkeypatch.setattr(autoattack, "APGD", partial(APGD, steps=10))
    monkeypatch.setattr(autoattack, "FAB", partial(FAB, steps=3))
    monkeypatch.setattr(autoattack, "MaxMinMargin", few_games)
    monkeypatch.setattr(autoattack, "Square", partial(Square, queries=50))
    namespace: dict[str, object] = {"__name__": path.stem}
    text = path.read_text(encoding="utf-8")
    for found in TO_RUN.finditer(text):
        line = text[: found.start(1)].count("\n")
        exec(compile("\n" * line + found[1], str(path), "exec"), namespace)


def test_pages_written_by_hand_use_the_words_of_the_field() -> None:
    """Prose outside code blocks; the four generated pages are left out."""
    words = re.compile(r"\b(victims?|glances?|slips?|crafted|refus\w+|promis\w+|proof)\b", re.I)
    generated = {"methods-cifar10", "methods-digits", "study-cifar10", "study-digits"}
    paths = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        f"{path.name}: {line}"
        for path in paths
        if path.stem not in generated
        for line in re.sub(r"```.*?```", "", path.read_text(), flags=re.S).splitlines()
        if words.search(line)
    ]
    assert found == []


def test_files_that_pages_name_exist() -> None:
    named = re.compile(r"`((?:demur|tests|tools|benchmarks|results)/[\w./-]+)`")
    for path in [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for name in named.findall(path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_the_map_of_the_packages_is_current() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "package_map.py"), "--check"]
    done = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
