"""The leaderboard as a static site: an index with all curves, and a page per entry."""

import re
import shlex
import shutil
from importlib.resources import files
from pathlib import Path

from demur.attacks.balls import Ball
from demur.errors import BadInput
from demur.files.atomic import replace_folder, write_text
from demur.files.output_paths import check_output_folder
from demur.leaderboard.entry import Entry, problems, read_entry
from demur.metrics import wilson
from demur.report.page import check_installed
from demur.report.terminal import percent

MARK = '<meta name="generator" content="demur leaderboard">'


def slug(net: str, rejector: str, ball: Ball) -> str:
    """The name of the file of an entry."""
    text = f"{net}-{rejector}-{type(ball).__name__}-{ball.eps:.3g}"
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:100]


def write_site(source: Path, out: Path) -> tuple[int, list[str]]:
    """Write the site; return the number of entries and why files are left out, a sentence each.
    Raises BadInput for a folder that is there and is no such site.
    """
    check_installed()
    index = Path(check_output_folder(str(out)) or "", "index.html")
    is_site = index.is_file() and MARK in index.read_text(encoding="utf-8", errors="replace")
    if out.is_dir() and any(out.iterdir()) and not is_site:
        raise BadInput(f"{out} is in the way: it is no leaderboard; name a new folder")
    from jinja2 import TemplateError

    pages, entries, faults = dict[str, str](), dict[str, Entry](), list[str]()
    for path in sorted(source.glob("[!.]*.json")):
        try:
            entry, name = read_entry(path), path.stem
            if wrong := problems(entry):
                raise BadInput("; ".join(wrong))
            pages[name], entries[name] = _rendered("entry", {name: entry}), entry
        except (BadInput, TemplateError) as error:  # TemplateError: a part that no figure needs
            faults.append(f"{path.name}: {error}")
    if not entries:
        raise BadInput("; ".join([*faults, f"{source} holds no entry to show; name their folder"]))
    with replace_folder(out) as (half, _):
        write_text(half / "index.html", _rendered("index", entries))
        for name, page in pages.items():
            write_text(half / f"{name}.html", page)
            shutil.copyfile(source / f"{name}.json", half / f"{name}.json")
    return len(entries), faults


def _rendered(page: str, entries: dict[str, Entry]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("demur.leaderboard", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    parts = ("report/page.css", "leaderboard/board.css", "leaderboard/board.js")
    base, own, script = (Markup(files("demur").joinpath(part).read_text("utf-8")) for part in parts)
    return environment.get_template(f"{page}.html.j2").render(
        entries=entries, percent=percent, quote=shlex.quote, wilson=wilson,
        mark=Markup(MARK), css=base + own, script=script,
    )  # fmt: skip
