"""Names that carry commands to a terminal, HTML or markdown reach no terminal, page or card."""

import io
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table
from torch import nn

from demur import BadInput, guard
from demur.cli.app import Visible
from demur.data import Images
from demur.errors import visible
from demur.guards import Guard
from demur.guards.export import model_card
from demur.report.terminal import VisibleConsole
from demur.runs import Run
from tests.conftest import Command

ESCAPES = ("\x1b[2J\x1b[31m", "\x1b]8;;http://x.y\x07link\x1b]8;;\x07", "\x1b]52;c;cm0=\x07",
           "\x9b2J", "\u202egpj.exe", "\r\x08")  # fmt: skip
MARKUP = ("<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>",
          "[click](javascript:alert(1))", "`<b>`|| x", "![i](http://x.y/i.png)")  # fmt: skip
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


class Tags(HTMLParser):
    """The elements of a page, with what could run a script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.handlers: list[str] = []
        self.scripts = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.handlers += [str(value) for _, value in attrs if "javascript:" in str(value)]


@pytest.mark.parametrize("name", ESCAPES)
def test_a_name_is_spelled_out_on_a_terminal(name: str) -> None:
    """Both by a plain write and in a table of rich, on a terminal and in a pipe."""
    for is_terminal in (True, False):
        out, table = io.StringIO(), Table()
        table.add_column(name)
        table.add_row(name)
        console = VisibleConsole(file=out, force_terminal=is_terminal, markup=False)
        console.print(table)
        console.print(name, style="red")
        shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # rich's own colours
        assert not UNSAFE.search(shown), shown
        assert "\x1b[2J" not in out.getvalue() and "\x1b[31mx" not in out.getvalue()
    out = io.StringIO()
    print(name, file=Visible(out))
    assert out.getvalue() == visible(name) + "\n"
    assert not UNSAFE.search(out.getvalue())
    assert visible("ok\n\tähm 🙂") == "ok\n\tähm 🙂"


def hostile_classes() -> list[str]:
    return [f"{k} {name}" for k, name in enumerate(MARKUP * 2)]


@pytest.fixture(scope="module")
def hostile_guard(test_images: Images) -> Guard:
    x, y = test_images.batch(slice(0, 200))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return guard(net, x, y, class_names=hostile_classes(), accept_chance=True)


def rendered_html(card: str) -> str:
    markdown = pytest.importorskip("markdown_it", reason="pip install markdown-it-py")
    return str(markdown.MarkdownIt("commonmark", {"html": True}).enable("table").render(card))


def test_a_model_card_holds_no_html_and_no_link_of_a_name(hostile_guard: Guard) -> None:
    for text in (*MARKUP, *ESCAPES):
        hostile_guard.calibration["sentence"] = text
        card = model_card(hostile_guard, f"module:{text}")
        assert not UNSAFE.search(card)
        page = rendered_html(card.split("---", 2)[2])
        assert not re.search("<(img|script|b|a)[ >]", page), page


def test_commands_print_and_write_no_hostile_name(
    hostile_guard: Guard, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class names of a guard and names of files, in predictions and in error messages."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    hostile_guard.save("guard")
    for k, name in enumerate((*ESCAPES, *MARKUP)):
        file = Path(f"{k}{name.replace('/', '_')}.png")
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(file)
        for words in (("predict", "guard", str(file)), ("predict", "guard", f"missing{name}"),
                      ("list", name), ("score", name), ("train", f"x{name}"),
                      ("attack", "guard", name), ("report", f"r{name}")):  # fmt: skip
            code, out, err = command(*words)
            assert code in (0, 2), (words, err)
            assert not UNSAFE.search(out + err), (words, out, err)


def test_pages_hold_no_markup_of_a_name(
    tiny_run: Run, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs and records whose names are HTML; the page has as many scripts as without."""
    monkeypatch.chdir(tmp_path)
    scripts = []
    for name in ("run", "<img src=x onerror=alert(1)>", "<script>alert(1)<_script>"):
        shutil.copytree(tiny_run.path, name)
        assert command("attack", name, "clean", "--n", "20")[0] == 0
        code, _, err = command("report", name)
        assert code == 0, err
        tags = Tags((Path(name) / "report.html").read_text())
        assert not tags.handlers
        scripts.append(tags.scripts)
    assert len(set(scripts)) == 1


def test_a_recipe_cannot_hold_control_characters_unseen(command: Command) -> None:
    for name in ESCAPES:
        code, out, err = command("list", "digits-pgdat-rr", f"head={name}")
        assert code == 2
        assert not UNSAFE.search(out + err)
        with pytest.raises(BadInput):
            Guard.load(name)
