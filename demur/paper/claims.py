"""Every number in the prose of README.md and results/conclusions.md, computed from its source.

    report = check_claims(Path("results"))
    report.problems             # what disagrees, in one sentence each

A claim is a phrase with `{}` for each number, and for each `{}` an expression over records,
benchmarks and the published tables. docs/guides/reproduce.md describes results/claims.toml.
"""

import ast
import json
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from demur.errors import BadInput, suggestion
from demur.paper.published import as_list, published_numbers
from demur.paper.studies import RecordMetrics, best_constants, p_value, rank_correlation, rr_loss

CLAIMS, GENERATED = "claims.toml", "\n## How to read the tables"
SHAPE: Any = {"pages": [str], "settings": [str], "names": {}, "claim": [{"text": str, "is": [str]}]}
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d*\.?\d+)(?:e-?\d+)?"
FIELD = rf"([-+]?{DIGITS}|{'|'.join(WORDS)})"
NUMBER = re.compile(rf"(?<![\w.]){DIGITS}")  # after a letter it is part of a name, such as L2
FORM = r"(?<![\w.])(?:{})(?![,.]?\d)"  # of a setting: whole words and numbers
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)\s]*\)", re.S)  # and targets of links
ROUNDED = {"up": (0.0, 1.0), "down": (-1.0, 0.0), "": (-0.5, 0.5)}  # printed minus computed
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.USub: operator.neg, ast.Lt: operator.lt, ast.Gt: operator.gt, ast.NotEq: operator.ne,
}  # fmt: skip
ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError)
FOLDERS = ("benchmarks/", "leaderboard/", "results/", "zoo/")  # of files with results


class Claim(NamedTuple):
    """A phrase of a page, and the sources of its numbers in their order."""

    text: str
    sources: list[str]

    @property
    def pattern(self) -> re.Pattern[str]:
        """The phrase with any white space, and with any number in place of `{}`."""
        parts = (
            r"\s+".join(map(re.escape, re.split(r"\s+", one))) for one in self.text.split("{}")
        )
        return re.compile(FIELD.join(parts))


class Claims(NamedTuple):
    """The claims of a folder of results."""

    pages: list[str]  # files, relative to the folder above
    settings: list[re.Pattern[str]]
    names: dict[str, Any]  # names of values, or of expressions that begin with =
    claims: list[Claim]


class Checked(NamedTuple):
    """A number of a page beside the one that its source gives."""

    place: str  # page and line
    printed: str
    computed: float
    source: str
    text: str

    @property
    def same(self) -> bool:
        """Whether the printed number is the computed one to its digits, rounded as asked."""
        if self.printed in WORDS:
            return bool(self.computed == WORDS.index(self.printed))
        printed, how = self.printed.replace(",", ""), self.source.partition(" ")[0]
        low, high = ROUNDED.get(how, ROUNDED[""])
        gap = (float(printed) - self.computed) * 10 ** len(printed.partition(".")[2])
        return bool(low - 1e-6 <= gap <= high + 1e-6)

    def __str__(self) -> str:
        said = f"{self.printed} is printed, {self.computed:.6g} is computed"
        word = "same" if self.same else "DIFFERENT"
        return f"{self.place}: {word}: {said}: {self.source} | {self.text}"


class Report(NamedTuple):
    """What was found; numbers of settings with their place."""

    checked: list[Checked]
    settings: list[str]
    problems: list[str]


def read_claims(folder: Path) -> Claims:
    """The claims of a folder of results; BadInput for a file that is not as documented."""
    path = folder / CLAIMS
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        _check_shape(found, SHAPE, "the file")
        for name, value in found["names"].items():
            _check_shape(as_list(value), [str], f"the name {name!r}")
        claims = [Claim(one["text"], one["is"]) for one in found["claim"]]
        settings = [re.compile(FORM.format(one.replace(" ", r"\s+"))) for one in found["settings"]]
    except OSError:
        raise BadInput(f"{path} is missing; name a folder with claims, such as results") from None
    except (BadInput, ValueError, re.error) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    for one in claims:
        if not one.sources or one.text.count("{}") != len(one.sources):
            raise BadInput(f"{path} needs one source for each {{}} of the claim: {one.text}")
    return Claims(found["pages"], settings, found["names"], claims)


def _check_shape(found: Any, shape: Any, where: str) -> None:
    """Raise BadInput unless tables have the keys of the shape, and all values its types."""
    kind: Any = shape if isinstance(shape, type) else type(shape)
    if not isinstance(found, kind):
        raise BadInput(f"{where} is {found!r:.60}, not a {kind.__name__}")
    if isinstance(shape, list):
        for number, one in enumerate(found, 1):
            _check_shape(one, shape[0], f"{where} {number}")
    elif shape and isinstance(shape, dict):
        for key in found.keys() - shape.keys():
            raise BadInput(f"{where} has the unknown key {key!r}; {suggestion(key, shape)}")
        for key, value in shape.items():
            _check_shape(found.get(key), value, f"{key!r} of {where}")


def check_claims(folder: Path) -> Report:
    """Compare every number of the pages with its source, or find that it is a setting."""
    known = read_claims(folder)
    pages = {name: _text(folder.resolve().parent / name) for name in known.pages}
    return check_pages(pages, known, Sources(folder, known.names))


def check_pages(pages: Mapping[str, str], known: Claims, sources: "Sources") -> Report:
    """The report on pages, texts by name."""
    report, spans = Report([], [], []), {name: set[int]() for name in pages}
    for claim in known.claims:
        found = [(name, one) for name in pages for one in claim.pattern.finditer(pages[name])]
        if not found:
            report.problems.append(f"no page has this phrase any more: {claim.text}")
        for name, match in found:
            for number, source in enumerate(claim.sources, 1):
                place = _place(name, pages[name], match.start(number))
                value = sources.number(source, claim.text)
                text = " ".join(match[0].split())
                report.checked.append(Checked(place, match[number], value, source, text))
                spans[name].update(range(*match.span(number)))
    report.problems.extend(str(one) for one in report.checked if not one.same)
    for name, text in pages.items():
        _check_rest(name, text, spans[name], known.settings, report)
    return report


def _text(path: Path) -> str:
    if not path.is_file():
        raise BadInput(f"the claims are about {path}, which is missing")
    return path.read_text(encoding="utf-8")


def _place(name: str, text: str, at: int) -> str:
    return f"{name}:{text.count(chr(10), 0, at) + 1}"


def _check_rest(
    name: str, text: str, claimed: set[int], settings: list[re.Pattern[str]], report: Report
) -> None:
    """Report every number that no claim covers and that is no setting."""
    text = CODE.sub(_blank, text)
    for line, part in enumerate(text.splitlines(), 1):
        if part.count("`") % 2:
            report.problems.append(f"{name}:{line}: the code of this line does not end on it")
    forms = {at for one in settings for found in one.finditer(text) for at in range(*found.span())}
    for number in NUMBER.finditer(text):
        at = range(*number.span())
        around = " ".join(text[max(0, at.start - 40) : at.stop + 30].split())
        where = f"{_place(name, text, at.start)}: {number[0]} in: {around}"
        if claimed.issuperset(at):
            if not forms.isdisjoint(at):
                report.problems.append(f"a form of settings covers a claimed number: {where}")
        elif forms.issuperset(at) and _is_whole(text, at):
            report.settings.append(where)
        else:
            report.problems.append(f"no claim covers this number: {where}")


def _blank(code: re.Match[str]) -> str:
    """Blanks in place of code, unless it has no letter."""
    return re.sub(r"\S", " ", code[0]) if re.search("[A-Za-z]", code[0]) else code[0]


def _is_whole(text: str, at: range) -> bool:
    """Whether a number has neither a point, an exponent, a sign nor %."""
    signed = re.search(r"(^|\W)[-+]$", text[max(0, at.start - 2) : at.start])
    is_integer = text[at.start : at.stop].replace(",", "").isdecimal()
    return is_integer and not signed and not text.startswith("%", at.stop)


class Sources:
    """Values of expressions: arithmetic over functions and over the names of the claims file."""

    def __init__(self, folder: Path, names: Mapping[str, Any]) -> None:
        self.root, self.names, self.number = folder.resolve().parent, names, cache(self._number)
        self.functions: dict[str, Callable[..., Any]] = RecordMetrics(folder).functions | {
            "published": published_numbers, "file": cache(self._file), "table": self._table,
            "column": column, "p_value": p_value, "rank": rank_correlation,
            "rr_loss": rr_loss, "best_constants": best_constants,
            "mean": np.mean, "std": lambda x: np.std(x, ddof=1), "median": np.median,
            "min": np.min, "max": np.max, "sum": np.sum, "abs": np.abs, "len": len,
            "join": lambda *parts: np.hstack(parts),
        }  # fmt: skip

    def _number(self, source: str, claim: str) -> float:
        """The number of a source; BadInput names the claim if there is none."""
        how, _, rest = source.partition(" ")
        try:
            return float(self._parse(rest if how in ("up", "down") else source))
        except (BadInput, ValueError, *ERRORS) as error:
            raise BadInput(f"{source} gives no number: {error}; its claim: {claim}") from error

    def _parse(self, text: str) -> Any:
        tree = ast.parse(text, mode="eval").body
        if not any(isinstance(one, ast.Name) for one in ast.walk(tree)):
            raise BadInput(f"{text} reads nothing; name a record or a file")
        return self._value(tree)

    def _value(self, node: ast.expr) -> Any:
        found: Any = None
        match node:
            case ast.Constant(found):
                pass
            case ast.List(parts):
                found = [self._value(one) for one in parts]
            case ast.Name(name) if name in self.names:
                found = self.names[name]
                if isinstance(found, str) and found.startswith("="):
                    found = self._parse(found[1:])
            case ast.Call(ast.Name(name), words, []) if name in self.functions:
                found = self.functions[name](*map(self._value, words))
            case ast.Subscript(part, key):
                table, at = self._value(part), self._value(key)
                of_each = isinstance(table, list) and isinstance(at, str)
                found = column(table, at) if of_each else table[at]
            case ast.Slice(low, high, step):
                found = slice(*(one and self._value(one) for one in (low, high, step)))
            case ast.BinOp(left, sign, right) | ast.Compare(left, [sign], [right]):
                found = OPERATORS[type(sign)](*map(np.asarray, map(self._value, (left, right))))
            case ast.UnaryOp(sign, one):
                found = OPERATORS[type(sign)](np.asarray(self._value(one)))
            case _:
                raise BadInput(f"{ast.unparse(node)!r} is no known name, function or operator")
        return found

    def _file(self, name: str) -> Any:
        """The values of a JSON file, or a list of those of the lines of a JSONL file."""
        if not name.startswith(FOLDERS):
            raise BadInput(f"{name} is in none of the folders {', '.join(FOLDERS)}")
        text = _text(self.root / name)
        return [*map(json.loads, text.splitlines())] if name.endswith("l") else json.loads(text)

    def _table(self, pattern: str) -> list[float]:
        """The numbers that a regular expression finds in the generated part of RESULTS.md."""
        text = _text(self.root / "RESULTS.md").partition(GENERATED)[2]
        return [float(one.replace(",", "")) for one in re.findall(pattern, text)]


def column(rows: Iterable[Any], key: Any) -> list[Any]:
    """The field of each row."""
    return [row[key] for row in rows]
