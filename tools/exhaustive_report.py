"""Write the results of `make exhaustive` into docs/exhaustive.md; exit with 1 on a failure.

    python tools/exhaustive_report.py build/exhaustive.jsonl build/exhaustive.txt docs/exhaustive.md

The first file has one line per test that ended, written as the tests end, so that a run that was
stopped counts as far as it went and the next one adds to it. The second lists all tests that have a
long version. What the page says above the line MARK stays.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MARK = "<!-- tools/exhaustive_report.py writes what follows -->"
TEXT = """
## Results of `make exhaustive`

{of} tests have a long version: {passed} passed, {failed} failed, {skipped} skipped, {missing} not
run, in {minutes:,.0f} minutes of computing. A row is a test with all its cases; n is the largest
number of samples of a case, where a test counts them.

| test | n | seconds | result | commit, date |
|---|---:|---:|---|---|
"""
Results = dict[str, dict[str, Any]]


def read_results(source: Path) -> Results:
    """The last result of each test; a line that was cut off is left out."""
    found: Results = {}
    for line in source.read_text().splitlines() if source.exists() else []:
        try:
            result = json.loads(line)
        except ValueError:
            continue
        found[result["test"]] = result
    return found


def row(name: str, cases: Sequence[dict[str, Any] | None]) -> str:
    """One row of the table: a test with all its cases, None for those that did not run."""
    ran = [case for case in cases if case is not None]
    outcomes = Counter(case["outcome"] for case in ran)
    outcomes["not run"] = len(cases) - len(ran)
    result = ", ".join(f"{count} {what}" for what, count in outcomes.items() if count)
    parts = sorted({case["scale"] for case in ran if case["scale"] < 1})
    result += "".join(f", {part:g} of the samples" for part in parts)
    n = max((case["n"] for case in ran), default=0)
    seconds = sum(case["seconds"] for case in ran)
    when = ", ".join(sorted({f"{case['commit']}, {case['date']}" for case in ran}))
    return f"| `{name}` | {f'{n:,}' if n else ''} | {seconds:,.0f} | {result} | {when} |"


def main(source: str, listed: str, target: str) -> int:
    """Write the page; return 1 if a test failed or none ran."""
    listing = Path(listed).read_text().splitlines()  # warnings of pytest name tests, too
    tests = sorted({one for one in listing if "::" in one and not one.startswith("Test: ")})
    results = {test: one for test, one in read_results(Path(source)).items() if test in tests}
    outcomes = [one["outcome"] for one in results.values()]
    text = TEXT.format(
        of=len(tests), missing=len(tests) - len(results),
        minutes=sum(one["seconds"] for one in results.values()) / 60,
        **{name: outcomes.count(name) for name in ("passed", "failed", "skipped")},
    )  # fmt: skip
    page = Path(target)
    above = page.read_text().partition(MARK)[0] if page.exists() else "# Long tests\n\n"
    cases = defaultdict(list)
    for test in tests:
        cases[test.partition("[")[0].removeprefix("tests/")].append(results.get(test))
    rows = "\n".join(row(name, those) for name, those in cases.items())
    page.write_text(f"{above}{MARK}\n{text}{rows}\n")
    return int(not results or "failed" in outcomes)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
