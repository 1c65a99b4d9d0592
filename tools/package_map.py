"""Draw docs/package-map.svg, and list every file of the package in docs/design.md.

    python tools/package_map.py                 # write both
    python tools/package_map.py --check         # exit 1 if one is out of date
    python tools/package_map.py FOLDER FILE     # draw another checkout and count its imports

The list has the first sentence of each file's docstring or first comment.

Layers come from LAYERS in tests/test_code_style.py. An arrow that follows from two others is left
out (transitive reduction), and so are arrows to the foundation, which every package may import.
"""

import ast
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "package-map.svg"
DESIGN = ROOT / "docs" / "design.md"
SMALL = 8000  # bytes of an __init__.py that only collects names
LIST = "<!-- files -->\n", "<!-- end of files -->\n"  # of the list in DESIGN
PURPOSE = {
    "paper": "tables, figures, studies",
    "cli": "the command",
    "audits": "any model: attack, verdict",
    "report": "text, figures, page",
    "serve": "the service",
    "guards": "decide, export, ONNX",
    "training": "epochs, steps, retrofit",
    "sanity": "checks of records",
    "evaluate": "attack, score, bind",
    "runs": "run folders, records",
    "engine": "GPU kernels, graphs",
    "recipes": "named recipes, attacks",
    "methods": "frameworks, heads",
    "attacks": "PGD, APGD, objectives",
    "rejectors": "Con, R-Con, KD, ...",
    "calibrate": "thresholds",
    "data": "digits, CIFAR",
    "nets": "ResNet, WideResNet",
    "metrics": "AUROC, intervals",
    "spec": "objects as text",
    "files": "checked reads and writes",
}
WIDTH, BOX_W, BOX_H, GAP_Y, TOP = 1000, 132, 44, 34, 16


def layers(root: Path) -> list[list[str]]:
    """Packages from the lowest layer to the highest."""
    tree = ast.parse((root / "tests" / "test_code_style.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LAYERS":
            found: list[list[str]] = ast.literal_eval(node.value)
            return found
    raise SystemExit("tests/test_code_style.py defines no LAYERS")


def imported_modules(path: Path) -> Iterator[tuple[str, str]]:
    """The module and the name of each import of this project in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("demur"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def imports(root: Path, package: str) -> set[str]:
    """The packages that the files of a package import."""
    folder = root / "demur" / package
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    found: set[str] = set()
    for path in paths:
        for module, name in imported_modules(path):
            found.add(name if module == "demur" else module.split(".")[1])
    return found - {package}


def file_imports(root: Path) -> set[tuple[str, str]]:
    """Every import of one file by another, as module names."""
    files = {}
    for path in (root / "demur").rglob("*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        files[module.removesuffix(".__init__")] = path
    found = set()
    for own, path in files.items():
        for module, name in imported_modules(path):
            found.add((own, f"{module}.{name}" if f"{module}.{name}" in files else module))
    return {(own, other) for own, other in found if own != other}


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """The edges without those that a longer path implies."""
    reach: dict[str, set[str]] = {}

    def below(name: str) -> set[str]:
        if name not in reach:
            reach[name] = set().union(*(below(child) | {child} for child in edges[name]), set())
        return reach[name]

    return {
        name: {c for c in children if not any(c in below(other) for other in children - {c})}
        for name, children in edges.items()
    }


def package_imports(root: Path) -> dict[str, set[str]]:
    """The packages above the foundation, each with those that it imports."""
    names = [name for layer in layers(root)[1:] for name in layer]
    return {name: imports(root, name) & set(names) for name in names}


def drawing(root: Path = ROOT) -> str:
    """The SVG text."""
    foundation, *upper = layers(root)
    names = [name for layer in upper for name in layer]
    edges = reduced(package_imports(root))
    place: dict[str, tuple[float, float]] = {}
    for depth, layer in enumerate(reversed(upper)):
        for i, name in enumerate(layer):
            x = WIDTH * (i + 1) / (len(layer) + 1) - BOX_W / 2
            place[name] = (x, TOP + depth * (BOX_H + GAP_Y))
    base = TOP + len(upper) * (BOX_H + GAP_Y)
    height = base + 78
    style = (
        "text{font:13px sans-serif;fill:#1d2430;text-anchor:middle}.p{font-size:11px;fill:#5a6472}"
        "rect{fill:#eef1fb;stroke:#5664b8;rx:6}path{fill:none;stroke:#9aa3b5;marker-end:url(#a)}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Packages of demur by layer; arrows point to imported packages">',
        f"<style>{style}</style>",
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" '
        'style="fill:#9aa3b5;stroke:none"/></marker></defs>',
        f'<rect x="0" y="0" width="{WIDTH}" height="{height}" style="fill:#fff;stroke:none"/>',
    ]
    for name in names:
        parts += [_arrow(place[name], place[child]) for child in sorted(edges[name])]
    for name in names:
        parts.append(_box(*place[name], BOX_W, BOX_H, name, PURPOSE.get(name, "")))
    half = (len(foundation) + 1) // 2
    parts.append(f'<rect x="20" y="{base}" width="{WIDTH - 40}" height="62"/>')
    for row, part in enumerate((foundation[:half], foundation[half:])):
        text = escape(" · ".join(part))
        parts.append(f'<text x="{WIDTH / 2:g}" y="{base + 26 + 22 * row}">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def file_list(root: Path = ROOT) -> str:
    """What is in every file, a list for each folder, in Markdown."""
    lines, folder = [], ""
    for path in sorted((root / "demur").rglob("*"), key=lambda p: (p.parent, p.name)):
        text = "" if path.is_dir() else summary(path)
        is_index = path.name == "__init__.py" and path.stat().st_size < SMALL
        if not text or is_index:
            continue
        if folder != (folder := path.parent.relative_to(root).as_posix()):
            lines += ["", f"**{folder}/**", ""]
        lines.append(f"- `{path.name}` {text}")
    return "\n".join([*lines, "", ""])


def summary(path: Path) -> str:
    """The first paragraph of a file's docstring, or of the comment that it begins with."""
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    elif path.suffix in (".js", ".css", ".j2"):
        begin = r'(?:"use strict";\n)?(?:/\*(.*?)\*/|\{#(.*?)-#\}|// (.*?)\n)'
        found = re.match(begin, path.read_text(encoding="utf-8"), re.DOTALL)
        text = next(filter(None, found.groups())) if found else ""
    else:
        return ""
    return " ".join(text.strip().split("\n\n")[0].split()).rstrip(".")


def with_list(page: str) -> str:
    """The page of the design with today's list."""
    before, _, rest = page.partition(LIST[0])
    return before + LIST[0] + file_list() + LIST[1] + rest.partition(LIST[1])[2]


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    x0, y0 = start[0] + BOX_W / 2, start[1] + BOX_H
    x1, y1 = end[0] + BOX_W / 2, end[1]
    bend = (y1 - y0) / 2
    return f'<path d="M{x0:g} {y0:g}C{x0:g} {y0 + bend:g} {x1:g} {y1 - bend:g} {x1:g} {y1:g}"/>'


def _box(x: float, y: float, width: float, height: float, name: str, purpose: str) -> str:
    middle = x + width / 2
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'
        f'<text x="{middle:g}" y="{y + 19:g}">{escape(name)}</text>'
        f'<text class="p" x="{middle:g}" y="{y + 35:g}">{escape(purpose)}</text>'
    )


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        page = DESIGN.read_text(encoding="utf-8")
        for file, new in ((TARGET, drawing()), (DESIGN, with_list(page))):
            if not file.exists() or file.read_text(encoding="utf-8") != new:
                raise SystemExit(f"{file} is out of date; run python tools/package_map.py")
    elif len(sys.argv) == 3:
        root = Path(sys.argv[1])
        Path(sys.argv[2]).write_text(drawing(root), encoding="utf-8")
        edges = package_imports(root)
        print(  # noqa: T201
            f"{len(file_imports(root))} imports between files, "
            f"{sum(map(len, edges.values()))} between {len(edges)} packages above the foundation"
        )
    else:
        TARGET.write_text(drawing(), encoding="utf-8")
        DESIGN.write_text(with_list(DESIGN.read_text(encoding="utf-8")), encoding="utf-8")
