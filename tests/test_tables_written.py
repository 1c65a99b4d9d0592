"""Tables as LaTeX, CSV and Markdown: the writer, and the commands that use it."""

import csv
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from demur.errors import BadInput
from demur.files.tables import TextTable, check_format, write_tables
from demur.runs import Run
from tests.conftest import Command
from tests.test_cli import expect_error

ODD = TextTable(
    "100% of $x_1$ & {#2}",
    ("name|s", "value"),
    [("a|b", "93.1 [92.0, 94.1]"), ("[c, d]", ""), ("*e~^\\", "-0.5 ± 1.2"), ("ü <>", "2")],
    "50% & more",
)


def parse(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def compiles(text: str, folder: Path) -> None:
    """Assert that LaTeX accepts the tables; skip without it."""
    if (program := shutil.which("pdflatex")) is None:
        pytest.skip("needs pdflatex")
    start = "\\documentclass{article}\n\\usepackage{booktabs,graphicx}\n\\begin{document}\n"
    (folder / "t.tex").write_text(f"{start}{text}\\end{{document}}\n", encoding="utf-8")
    words = [program, "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (folder / "t.pdf").read_bytes().startswith(b"%PDF")


def test_csv_has_a_column_for_each_number() -> None:
    table, *rows = parse(write_tables([ODD], "csv"))
    (line, *_) = json.loads(write_tables([ODD], "json"))[0]["rows"]
    assert (line["name|s"], line["value low"]) == ("a|b", "92.0")
    assert table == ["table", "name|s", "value", "value deviation", "value low", "value high"]
    assert rows[0] == [ODD.title, "a|b", "93.1", "", "92.0", "94.1"]
    assert rows[1] == [ODD.title, "[c, d]", "", "", "", ""]
    assert rows[2][2:] == ["-0.5", "1.2", "", ""]
    assert rows[3][1:3] == ["ü <>", "2"]


def test_tables_with_the_same_columns_share_a_header() -> None:
    other = TextTable("other", ("name",), [("x",)])
    same = write_tables([other, other._replace(title="third")], "csv")
    assert parse(same) == [["table", "name"], ["other", "x"], ["third", "x"]]
    assert parse(write_tables([other, ODD], "csv"))[2] == []
    assert write_tables([TextTable("empty", ("name",), [])], "csv") == "table,name\n"


def test_markdown_and_latex_escape_names(tmp_path: Path) -> None:
    text = write_tables([ODD], "markdown")
    lines = text.splitlines()
    assert lines[2:4] == [r"| name\|s | value |", "|---|---:|"]
    assert r"| a\|b | 93.1 [92.0, 94.1] |" in lines
    assert lines[-1] == ODD.note
    latex = write_tables([ODD, TextTable("empty", ("a", "b"), [])], "latex")
    assert r"\caption{100\% of \$x\_1\$ \& \{\#2\}. 50\% \& more}" in latex
    assert "\n{}[c, d] & " in latex, "a bracket would be an argument of the line break before"
    assert r"-0.5 $\pm$ 1.2" in latex
    compiles(latex, tmp_path)


def test_an_unknown_format_is_one_sentence(command: Command) -> None:
    assert check_format("csv") == "csv"
    with pytest.raises(BadInput, match="no format is called 'cvs'; did you mean csv"):
        check_format("cvs")
    expect_error(command("score", "x", "--format", "latx"), "no format is called 'latx'", "latex")


@pytest.fixture
def run_here(tiny_run: Run, in_empty_folder: Path, command: Command) -> Path:
    """The shared run with two records under runs/tiny."""
    path = Path(shutil.copytree(tiny_run.path, in_empty_folder / "runs" / "tiny"))
    assert command("attack", "tiny", "clean", "pgd-20:steps=2", "--n", "100")[0] == 0
    return path


def test_score_writes_every_format(command: Command, run_here: Path, tmp_path: Path) -> None:
    words = ("score", "tiny", "--format")
    code, out, err = command(*words, "csv")
    assert code == 0
    assert "Sanity: " in err, "a file holds nothing but tables"
    assert "Sanity" not in out
    header, *rows = parse(out)
    assert header[:5] == [
        "table", "attack", "rejector", "accuracy of accepted", "accuracy of accepted low",
    ]  # fmt: skip
    assert {row[1] for row in rows} == {"clean, n=100", "pgd-20:steps=2, n=100"}
    found = {(row[0][:5], row[1], row[2]): dict(zip(header, row, strict=True)) for row in rows}
    code, out, _ = command(*words, "json")
    assert (code, out) == (0, command("score", "tiny", "--json")[1])
    compared = 0
    for row in json.loads(out)["rows"]:
        if row["rejector"] in ("Con", "R-Con"):
            line = found[row["protocol"][:5], f"{row['attack']}, n=100", row["rejector"]]
            assert line["AUROC"] == f"{row['ranking']['auroc']:.3f}"
            assert line["coverage low"] == f"{100 * row['coverage_interval']['lo']:.1f}"
            compared += 1
    assert compared == 8
    text = command(*words, "markdown")[1]
    assert re.search(r"^\| clean, n=100 \| R-Con \| [\d.]+ \[", text, re.MULTILINE)
    compiles(command(*words, "latex")[1], tmp_path)


def test_records_have_a_table_of_metrics(run_here: Path) -> None:
    from demur import metrics

    records = Run(run_here).records("test")
    table = records.metrics(coverage=0.7, risk=0.1)
    assert list(table["attack"].unique()) == ["clean", "pgd-20:steps=2"]
    images = records.to_pandas()
    for line in table.to_dict("records"):
        part = images[images["attack"] == line["attack"]]
        score, correct = part[line["score"]], part["correct"]
        assert line["auroc"] == metrics.auroc(score, correct)
        assert line["risk_at_coverage"] == metrics.risk_at_coverage(score, correct, 0.7)
        assert line["coverage_at_risk"] == metrics.coverage_at_risk(score, correct, 0.1)
    assert {"Con", "R-Con", "T-Con"} <= set(table["score"])


def test_metrics_at_a_level_are_those_of_the_curve() -> None:
    from demur import metrics

    score, correct = [0.9, 0.8, 0.8, 0.3, 0.1], [1, 1, 0, 1, 0]
    assert metrics.risk_at_coverage(score, correct, 0.2) == 0
    assert metrics.risk_at_coverage(score, correct, 0.4) == pytest.approx(1 / 3)  # ties go together
    assert metrics.risk_at_coverage(score, correct, 1.0) == 0.4
    assert metrics.coverage_at_risk(score, correct, 0.05) == 0.2
    assert metrics.coverage_at_risk(score, correct, 0.25) == 0.8
    assert metrics.coverage_at_risk([1, 2], [0, 0], 0.5) == 0
    assert metrics.coverage_at_risk([1, 2], [1, 1], 0.05) == 1
    for wrong in (0, 1.5, -1):
        with pytest.raises(BadInput, match="give a share"):
            metrics.risk_at_coverage(score, correct, wrong)
        with pytest.raises(BadInput, match="give a share"):
            metrics.coverage_at_risk(score, correct, wrong)
