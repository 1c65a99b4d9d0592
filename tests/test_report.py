"""The report page and its figures, made from a run that is trained for a second."""

import html
import os
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from demur.attacks import PGD, Clean
from demur.attacks.balls import Linf
from demur.calibrate import Coverage
from demur.errors import BadInput
from demur.evaluate import (
    LoadedRun,
    RecordOptions,
    RejectorEvaluation,
    Row,
    ScoredRecord,
    run_attack,
)
from demur.evaluate.certificates import issue, retests
from demur.files.checked_files import write_json, write_tensors
from demur.methods import RR
from demur.metrics import Interval
from demur.recipes import recipe
from demur.report.page import page_text, write_page
from demur.report.scored_runs import ScoredRun
from demur.report.terminal import comparable
from demur.runs import Run
from demur.sanity import run_checks
from demur.spec import digest as spec_digest

N, STORED = 120, 90
VOID = {"meta", "link", "img", "br", "input"}
CHROMIUM = shutil.which("chromium")
REQUIRED = os.environ.get("DEMUR_REQUIRE_BROWSER") == "1"


class Page(NamedTuple):
    results: ScoredRun
    path: Path
    text: str

    @property
    def loaded(self) -> LoadedRun:
        return self.results.loaded

    @property
    def evaluation(self) -> RejectorEvaluation:
        return self.results.evaluation

    @property
    def scored(self) -> list[ScoredRecord]:
        return self.results.scored


def small_run(path: Path, name: str) -> Run:
    """Return a run trained just long enough to make both correct and wrong predictions."""
    spec = recipe(name)
    with Run.claim(path, spec) as run:
        pass
    net = spec.net.build(spec.data.domain, spec.method.head)
    fit = spec.data.load()["fit"]
    weights = list(net.parameters())
    for begin in range(0, 900, 60):
        x, y = fit.batch(slice(begin, begin + 60))
        out = net(x)
        loss = torch.nn.functional.cross_entropy(out.logits, y)
        if isinstance(spec.method.head, RR):
            loss = loss + spec.method.head.loss_per_image(out, y).mean()
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(0.3 * gradient)
    digest = write_tensors(run.path / "model.safetensors", net.state_dict())
    metadata = {"epoch": 1, "value": 0.5, "reason": "made for a test", "weights": digest}
    write_json(run.path / "checkpoint.json", metadata | {"recipe_digest": spec_digest(spec)})
    return run


def make_page(run: Run, path: Path, zero_gradients: int = 0) -> Page:
    results = make_results(run, zero_gradients)
    write_page([results], path)
    return Page(results, path, path.read_text(encoding="utf-8"))


def make_results(run: Run, zero_gradients: int = 0) -> ScoredRun:
    """Attack, certify and score a run."""
    loaded = LoadedRun(run, torch.device("cpu"))
    options = RecordOptions(n=N, keep_images=STORED)
    records = [
        run_attack(loaded, "pgd-20:steps=3", PGD(Linf(0.15), steps=3, step_size=0.0375), options),
        run_attack(loaded, "clean", Clean(), options),
    ]
    records[0].metadata["probe"] |= {"zero_gradients": zero_gradients}  # raises a sanity flag
    issue(loaded, "Con", Coverage(0.2), 0.8)
    evaluation = RejectorEvaluation.of(loaded)
    scored = [evaluation.score_record(record) for record in records]
    return ScoredRun(loaded, evaluation, scored)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """The page of a net with R-Con in a folder named as HTML, and of a flagged net without it."""
    folder = tmp_path_factory.mktemp("report")
    return {
        name: make_page(
            small_run(folder / "runs" / folder_name, name), folder / f"{name}.html", zero_gradients
        )
        for name, folder_name, zero_gradients in (
            ("digits-pgdat-rr", "<b>x", 0),
            ("digits-pgdat", "plain", 100),
        )
    }


@pytest.fixture(scope="module")
def rectified(pages: dict[str, Page]) -> Page:
    return pages["digits-pgdat-rr"]


@pytest.fixture(scope="module", params=["digits-pgdat-rr", "digits-pgdat"])
def page(pages: dict[str, Page], request: pytest.FixtureRequest) -> Page:
    return pages[request.param]


class Reader(HTMLParser):
    """Checks that tags balance; collects addresses, ids and the cells of every table row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [given[k] or "" for k in ("src", "href") if k in given]
        self.ids += [given["id"] or ""] if "id" in given else []
        if tag == "img":
            assert given.get("alt")
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.stack) and data.strip():
            cells = self.tables[-1][-1]
            cells[-1] = f"{cells[-1]} {data.strip()}".strip()


def plain(text: str) -> str:
    """Return the text of a page without tags."""
    body = re.sub(r"<(style|script).*?</\1>", "", text, flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


def test_page_is_complete_and_needs_no_other_file(page: Page) -> None:
    read = Reader(page.text)
    assert page.text.startswith("<!doctype html>")
    assert read.addresses
    anchors = {f"#{name}" for name in read.ids}
    assert all(address.startswith("data:") or address in anchors for address in read.addresses)
    assert not re.search(r"https?://|url\((?!#)|@import", page.text)
    assert len(set(read.ids)) == len(read.ids)
    assert "default-src 'none'" in page.text
    assert "connect-src 'none'" in page.text


def test_tables_show_the_figures_of_the_rows(page: Page) -> None:
    tables = [table for table in Reader(page.text).tables if len(table[:1] and table[0]) == 8]
    ordered = [page.scored[1], page.scored[0]]  # the clean record comes first
    for table, protocol in zip(tables, ("deploy", "paper"), strict=True):
        found = [
            cells for cells in table[1:] if len(cells) > 1 and cells[0] != "none all are accepted"
        ]
        rows = [row for entry in ordered for row in entry.rows if row.protocol == protocol]
        assert len(found) == len(rows)
        for cells, row in zip(found, rows, strict=True):
            check_cells(cells, row)
        alone = [cells for cells in table if cells[0] == "none all are accepted"]
        assert [cells[1].split()[0] for cells in alone] == [
            f"{100 * entry.summary.accuracy:.1f}%" for entry in ordered
        ]


def check_cells(cells: list[str], row: Row) -> None:
    def with_interval(value: float, interval: Interval) -> str:
        return f"{100 * value:.1f}% {100 * interval.lo:.1f} to {100 * interval.hi:.1f}"

    point = row.point
    assert cells[0].startswith(row.rejector)
    if point.accepted:
        assert cells[1] == with_interval(point.accuracy, row.accuracy_interval)
    gap = [f"{round(100 * v, 1) + 0.0:+.1f}" for v in row.accuracy_vs_con[:3]]
    beside = f"{gap[0]} {gap[1]} to {gap[2]}"
    assert cells[2] == (beside if comparable(row) else "n/a")
    assert cells[3] == with_interval(point.coverage, row.coverage_interval)
    assert cells[4] == with_interval(point.accepted_wrong, row.accepted_wrong_interval)
    assert cells[5].startswith(f"{100 * point.tpr:.1f}%")
    area = row.ranking.auroc_interval
    assert cells[6] == f"{row.ranking.auroc:.3f} {area.lo:.3f} to {area.hi:.3f}"
    assert cells[7].endswith(f"from {row.threshold_from}")
    if np.isfinite(point.threshold):
        assert f"{point.threshold:.3f}" in cells[7]


def test_a_certificate_is_shown_with_every_retest(page: Page) -> None:
    ((made, lines),) = retests(page.loaded, page.evaluation.scores, [s.record for s in page.scored])
    text = plain(page.text)
    assert made.metadata["sentence"] in text
    for line in lines:
        assert line.observed is not None
        assert f"at least 20.0 {100 * line.observed:.1f} [" in text


def test_sanity_flags_are_shown_in_full(page: Page) -> None:
    records = [entry.record for entry in page.scored]
    checks, text = run_checks(records, page.evaluation), plain(page.text)
    found = [flag for check in checks for flag in check.flags]
    flagged = page.loaded.run.path.name == "plain"
    assert ("exactly zero at 100 of 120 clean images" in text) == flagged
    assert len(found) == page.text.count('<div class="flag">')
    for flag in found:
        assert (
            f"{flag.kind} {', '.join(flag.attacks)} {flag.observed} Remedy: {flag.remedy}" in text
        )
    assert "A failed attack makes a net seem robust." in text
    name = "plain" if flagged else "'<b>x'"
    assert f"demur attack {name} pgd-100:eps=128/255" in text


def test_sentences_agree_with_the_rows(page: Page) -> None:
    name = page.results.main_rejector
    assert len(page.scored) > 1
    for entry in page.scored:
        row = next(r for r in entry.rows if (r.rejector, r.protocol) == (name, "deploy"))
        point, rejected = row.point, row.point.n - row.point.accepted
        wrong = round((1 - entry.summary.accuracy) * point.n - point.accepted_wrong * point.n)
        correct = round(point.accuracy * point.accepted)
        assert (
            f"of {point.n} images {point.accepted} were accepted, {correct} of them correct; "
            f"{rejected} were rejected, of which {wrong} would have been wrong."
        ) in plain(page.text)


def test_names_cannot_break_out_of_the_page(pages: dict[str, Page]) -> None:
    text = pages["digits-pgdat-rr"].text
    assert "&lt;b&gt;x" in text
    assert "<b>x" not in text


def test_net_without_second_output_has_no_rcon(pages: dict[str, Page]) -> None:
    assert "R-Con" in plain(pages["digits-pgdat-rr"].text)
    text = plain(pages["digits-pgdat"].text)
    glossary = text.index("Glossary")
    assert "R-Con" not in text[:glossary]


def test_same_records_give_the_same_bytes_and_leave_matplotlib_alone(rectified: Page) -> None:
    import matplotlib

    def settings() -> dict[str, object]:  # looking the backend up would itself choose one
        return {
            name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"
        }

    before = settings()
    with matplotlib.rc_context({"font.size": 31, "axes.facecolor": "red"}):
        again = rectified.path.with_name("again.html")
        assert write_page([rectified.results], again) == again
    assert again.read_bytes() == rectified.path.read_bytes()
    assert settings() == before


def test_footer_shows_the_command_of_every_record(page: Page) -> None:
    words = plain(page.text)
    name = "'<b>x'" if page.loaded.run.path.name == "<b>x" else "plain"
    assert f"demur attack {name} pgd-20:steps=3 --n {N} --keep-images {STORED}" in words
    assert page.loaded.run.checkpoint["weights"] in words
    assert "demur train digits-pgdat" in words
    for entry in page.scored:
        assert entry.record.digest in words
        assert str(entry.record.metadata["code"]) in words


def with_records(page: Page, scored: list[ScoredRecord]) -> ScoredRun:
    return ScoredRun(page.loaded, page.evaluation, scored)


def test_a_label_that_now_means_another_attack_is_replaced_by_its_spec(rectified: Page) -> None:
    entry = rectified.scored[0]
    about = entry.record.metadata | {"label": "pgd-100"}
    renamed = ScoredRecord(
        type(entry.record)(entry.record.arrays, about), entry.summary, entry.rows
    )
    words = plain(page_text([with_records(rectified, [renamed])]))
    assert "demur attack" in words
    assert "@attack.txt" in words
    assert f"echo '{about['spec']}' > attack.txt" in words


def test_changed_data_raise(rectified: Page) -> None:
    entry = rectified.scored[0]
    about = entry.record.metadata | {"data": "0" * 64}
    other = ScoredRecord(type(entry.record)(entry.record.arrays, about), entry.summary, entry.rows)
    with pytest.raises(BadInput, match="made of other images"):
        page_text([with_records(rectified, [other])])


@pytest.mark.parametrize("absent", ["matplotlib", "jinja2"])
def test_a_missing_extra_raises(
    rectified: Page, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    path = rectified.path.with_name("never.html")
    with pytest.raises(BadInput, match=r"pip install 'demur\[report\]'"):
        write_page([rectified.results], path)
    assert not path.exists()


@pytest.mark.skipif(CHROMIUM is None and not REQUIRED, reason="needs chromium")
def test_page_fits_a_phone_and_fetches_nothing(pages: dict[str, Page]) -> None:
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "DEMUR_REQUIRE_BROWSER=1, but no chromium is installed"
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    requests: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=quiet)
        tab = browser.new_page(viewport={"width": 390, "height": 800})
        tab.on("request", lambda request: requests.append(request.url))
        for page in pages.values():
            tab.goto(page.path.as_uri())
            tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390
            assert tab.evaluate("[...document.images].filter(i => !i.naturalWidth).length") == 0
        browser.close()
    files = [page.path.as_uri() for page in pages.values()]
    assert [url for url in requests if not url.startswith("data:")] == files
