"""`demur paper claims`: the numbers in the prose of README.md and of the conclusions."""

import json
import re
from pathlib import Path

import pytest

from demur.errors import BadInput
from demur.paper import claims
from demur.paper.claims import Checked, Claims, Sources, check_pages, read_claims
from tests.conftest import Command
from tests.samples import Samples
from tests.test_cli import expect_error

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
WORDS = ("paper", "claims", "--from", "results")
SMALL = """
pages = ["page.md"]
settings = ['\\d+ epochs']
[names]
report = "=file('benchmarks/report.json')"
[[claim]]
text = "it takes {} s"
is = ["report['seconds']"]
"""


@pytest.fixture(scope="module")
def known() -> Claims:
    return read_claims(RESULTS)


@pytest.fixture(scope="module")
def sources(known: Claims) -> Sources:
    """The sources, which keep every number that they computed."""
    return Sources(RESULTS, known.names)


@pytest.fixture(scope="module")
def pages(known: Claims) -> dict[str, str]:
    return {name: (ROOT / name).read_text() for name in known.pages}


def test_every_number_of_the_pages_has_a_source_or_is_a_setting(
    command: Command, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(claims, "Sources", lambda *words: sources)
    code, out, err = command(*WORDS)
    assert code == 0, err
    *lines, count = out.splitlines()
    assert re.fullmatch(r"(\d+) numbers have a source, \d+ are settings, 0 problems", count)
    assert len(lines) == int(count.split()[0]) > 350
    assert all(": same: " in line for line in lines)
    for page in ("README.md", "results/conclusions.md"):
        assert sum(line.startswith(page) for line in lines) > 50
    (line,) = [
        one for one in lines if one.startswith("README.md") and "accuracy(best, 'auto" in one
    ]
    assert "50.95 is printed, 50.95 is computed" in line


def test_a_changed_number_of_a_page_is_a_problem(
    known: Claims, sources: Sources, pages: dict[str, str], samples: Samples
) -> None:
    places = [
        (name, *match.span(number))
        for claim in known.claims
        for name in pages
        for match in claim.pattern.finditer(pages[name])
        for number in range(1, len(claim.sources) + 1)
    ]
    every = max(1, len(places) // samples(20, len(places)))
    for name, start, end in places[::every]:
        text = pages[name]
        printed = text[start:end]
        last = f"{(int(printed[-1]) + 5) % 10}" if printed[-1].isdecimal() else ""
        changed = f"{printed[:-1]}{last}" if last else "zero"
        other = f"{text[:start]}{changed}{text[end:]}"
        found = check_pages(pages | {name: other}, known, sources).problems
        assert any(name in one and "DIFFERENT" in one for one in found), text[start - 50 : end]


@pytest.mark.parametrize("page", ["README.md", "results/conclusions.md"])
def test_a_number_without_a_source_is_a_problem(
    page: str, known: Claims, sources: Sources, pages: dict[str, str]
) -> None:
    """No form of settings covers a result, even where the same digits stand elsewhere."""
    printed = {one.printed for one in check_pages(pages, known, sources).checked}
    numbers = sorted(one for one in printed if not one.isalpha())
    more = ["58.2%", "`58.2`", "+5", "-3", "2 %", "12 of 43", "10", "255", "1,000", "17 s", "36%",
            "8 verdicts", "of 1,000 images 7", "x 3.5", "36.0 epochs", "7 epochs",
            "+36 epochs", "n = 36", "1,234 images"]  # fmt: skip
    results = [f"R-Con has {one} here." for one in (*numbers, *more)]
    text = "\n\n".join([pages[page], *results])
    found = check_pages(pages | {page: text}, known, sources).problems
    assert [one for one in results if not any(f"R-Con has {_shown(one)}" in p for p in found)] == []


def _shown(sentence: str) -> str:
    return sentence.removeprefix("R-Con has ").split()[0].strip("`")


def test_settings_are_whole_numbers(known: Claims, sources: Sources, pages: dict[str, str]) -> None:
    settings = check_pages(pages, known, sources).settings
    assert all(re.match(r"\S+:\d+: [\d,]+ in: ", one) for one in settings)
    wide = known._replace(settings=[*known.settings, re.compile(r"[-+±\w.,%\[\] ]+")])
    report = check_pages(pages, wide, sources)
    assert any("a form of settings covers a claimed number" in one for one in report.problems)
    extra = {"README.md": pages["README.md"] + "\nAbout 58.2 and 61% and +7 were seen."}
    found = check_pages(pages | extra, wide, sources).problems
    assert sum("no claim covers this number" in one for one in found) == 3


def test_a_phrase_that_is_gone_is_a_problem(
    known: Claims, sources: Sources, pages: dict[str, str]
) -> None:
    other = pages["README.md"].replace("times as fast as", "times faster than")
    found = check_pages(pages | {"README.md": other}, known, sources).problems
    assert any("no page has this phrase any more: it is {} to {} times as fast" in p for p in found)


@pytest.mark.parametrize(
    ("printed", "computed", "source", "same"),
    [
        (".776", 0.77649, "x", True), (".776", 0.77651, "x", False), ("+.013", 0.0131, "x", True),
        ("-.000", -0.0003, "x", True), ("1,000", 1000, "x", True), ("26", 25.7, "x", True),
        ("three", 3, "x", True), ("three", 2.9, "x", False), ("1.3", 1.21, "up x", True),
        ("1.3", 1.31, "up x", False), ("1.3", 1.19, "up x", False), ("1.3", 1.39, "down x", True),
    ],
)  # fmt: skip
def test_a_number_is_the_rounded_one(
    printed: str, computed: float, source: str, same: bool
) -> None:
    assert Checked("page.md:1", printed, computed, source, "text").same == same


@pytest.fixture
def small(in_empty_folder: Path) -> Path:
    """A page with a number of a report."""
    for name in ("results", "benchmarks"):
        (in_empty_folder / name).mkdir()
    (in_empty_folder / "benchmarks" / "report.json").write_text(json.dumps({"seconds": 20.251}))
    (in_empty_folder / "page.md").write_text("After 36 epochs it takes 20.3 s.\n")
    (in_empty_folder / "results" / "claims.toml").write_text(SMALL)
    return in_empty_folder


def test_the_exit_code_says_whether_text_and_source_agree(command: Command, small: Path) -> None:
    code, out, err = command(*WORDS)
    assert (code, err) == (0, "")
    assert "page.md:1: same: 20.3 is printed, 20.251 is computed: report['seconds']" in out
    (small / "page.md").write_text("After 36 epochs it takes 21 s,\nand 7 of 10 agree. `a\n")
    code, _, err = command(*WORDS)
    assert code == 1
    assert [one.split(" in: ")[0] for one in err.splitlines()] == [
        "demur: page.md:1: DIFFERENT: 21 is printed, 20.251 is computed: report['seconds'] | it "
        "takes 21 s",
        "demur: page.md:2: the code of this line does not end on it",
        "demur: no claim covers this number: page.md:2: 7",
        "demur: no claim covers this number: page.md:2: 10",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("settings", "setings", "unknown key 'setings'; did you mean settings"),
        ("text =", "txt =", "'claim' of the file 1 has the unknown key 'txt'"),
        ('["page.md"]', '"page.md"', "'pages' of the file is 'page.md', not a list"),
        ("[\"report['seconds']\"]", "[20.3]", "20.3, not a str"),
        ("report = \"=file('benchmarks/report.json')\"", "report = 1", "name 'report' is 1"),
        ("{} s", "20.3 s", "one source for each {} of the claim: it takes 20.3 s"),
        ("'\\d+ epochs'", "'(\\d+ epochs'", "cannot be read"),
        ("pages", "pages = ", "cannot be read"),
        ("page.md", "other.md", "other.md, which is missing"),
        ("report['seconds']", "20.3", "20.3 gives no number: 20.3 reads nothing"),
        ("report['seconds']", "report['hours']", "report['hours'] gives no number: 'hours'"),
        ("report['seconds']", "report", "gives no number"),
        ("report['seconds']", "time('x')", "no known name, function or operator"),
        ("report['seconds']", "report['seconds'] ** 2", "gives no number"),
        ("report['seconds']", "accuracy('no-run', 'clean')", "has no run 'no-run'; its claim: it"),
        ("benchmarks/report.json", "benchmarks/none.json", "none.json, which is missing"),
        ("benchmarks/report.json", "page.md", "none of the folders benchmarks/"),
        ("report = \"=file('benchmarks/report.json')\"", "report = '=report'", "gives no number"),
    ],
)
def test_a_wrong_claims_file_is_one_sentence(
    old: str, new: str, message: str, command: Command, small: Path
) -> None:
    path = small / "results" / "claims.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    expect_error(command(*WORDS), message)


def test_a_folder_without_claims_is_one_sentence(command: Command, in_empty_folder: Path) -> None:
    expect_error(command(*WORDS), "results/claims.toml is missing")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "accuracy('methods-cifar10/pgdat-seed0', 'pgd-7')",
            "there is no 'pgd-7'; did you mean pgd-",
        ),
        ("accuracy('methods-cifar10/pgdat-seed0', 'pgd*')", "2 attacks like 'pgd*', not one"),
        ("auroc('methods-cifar10/pgdat-seed0', 'clean', 'Cone')", "has no rejector 'Cone'"),
        ("distance('methods-cifar10/pgdat-seed0', 'clean')", "has no distances of C&W"),
        ("published(2, 'PGD-AT, RR', 'clean')", "there is no 'clean'"),
        ("published(2, 'LID*', '*')", "there is no 'LID*'"),
    ],
)
def test_a_missing_source_is_one_sentence(sources: Sources, source: str, message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)) as raised:
        sources.number(source, "R-Con has {}")
    assert "its claim: R-Con has {}" in str(raised.value)
