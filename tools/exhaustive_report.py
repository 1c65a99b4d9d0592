"""Write docs/exhaustive.md from the JUnit file of `make exhaustive`; exit with 1 on a failure.

python tools/exhaustive_report.py build/exhaustive.xml docs/exhaustive.md
"""

import platform
import sys
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

TEXT = """\
# Exhaustive tests

For a reader who wants to know how far the tests were taken. `make exhaustive` wrote this page. It
runs the long versions of the tests that the suite samples: faults at every file operation, fuzzed
inputs, simulated guarantees, examples of hypothesis, and comparisons with other libraries.

{when}, Python {python}, torch {torch}, {machine}: {passed} passed, {failed} failed, {skipped}
skipped in {minutes:.0f} minutes of computing. n is the number of samples, where a test counts them.

| test | n | seconds | result |
|---|---:|---:|---|
"""


def result(case: ElementTree.Element) -> str:
    """How a test ended, in one word."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def row(case: ElementTree.Element) -> str:
    """One row of the table."""
    module = case.get("classname", "").removeprefix("tests.").replace(".", ": ", 1)
    name = f"{module}, {case.get('name', '')}".replace("|", "/").replace("`", "'")
    found = [one.get("value", "") for one in case.iter("property") if one.get("name") == "n"]
    n = f"{sum(map(int, found)):,}" if found else ""
    return f"| `{name}` | {n} | {float(case.get('time', 0)):,.0f} | {result(case)} |"


def main(source: str, target: str) -> int:
    """Write the page; return 1 if a test failed or none ran."""
    suite = next(ElementTree.parse(source).iter("testsuite"))
    cases = sorted(suite.iter("testcase"), key=lambda one: (one.get("classname"), one.get("name")))
    results = [result(case) for case in cases]
    header = TEXT.format(
        when=suite.get("timestamp", "")[:10], python=platform.python_version(),
        torch=version("torch"), machine=platform.machine(),
        minutes=sum(float(case.get("time", 0)) for case in cases) / 60,
        **{name: results.count(name) for name in ("passed", "failed", "skipped")},
    )  # fmt: skip
    Path(target).write_text(header + "\n".join(map(row, cases)) + "\n")
    return int(not cases or "failed" in results)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
