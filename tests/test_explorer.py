"""The explorer in Chromium: its figures are the library's, and everyone can reach everything."""

import base64
import html
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from demur import metrics
from demur.calibrate import Coverage
from demur.evaluate import LoadedRun, RejectorEvaluation, ScoredRecord, values
from demur.evaluate.certificates import issue, retests
from demur.metrics import BoolArray, FloatArray
from demur.output import prediction
from demur.paper.theorems import theorem1
from demur.paper.theory import outputs_at
from demur.rejectors.certainty import con, rcon
from demur.report.explorer import packed
from demur.report.page import write_page
from demur.report.scored_runs import ScoredRun
from demur.report.terminal import percent, signed
from demur.runs import Record, Run
from tests.test_report import make_results, small_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page

CHROMIUM = shutil.which("chromium")
REQUIRED = os.environ.get("DEMUR_REQUIRE_BROWSER") == "1"
pytestmark = pytest.mark.skipif(CHROMIUM is None and not REQUIRED, reason="needs chromium")

ARCHIVE = Path(__file__).parents[1] / "results" / "cifar10-pgdat-rr-short-seed0"
ATTACK = "pgd-20:steps=3"
MOST_BYTES, MOST_MS = 12_000_000, 100


@dataclass
class Pages:
    """One run with R-Con and certificates, that run beside another, and an archive of CIFAR-10."""

    one: Path
    two: Path
    archive: Path
    results: ScoredRun
    archived: ScoredRun

    @property
    def scored(self) -> ScoredRecord:
        return next(entry for entry in self.results.scored if entry.record.label == ATTACK)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    folder = tmp_path_factory.mktemp("explorer")
    names = ("digits-pgdat-rr", "digits-pgdat")
    results, plain = (make_results(small_run(folder / name, name)) for name in names)
    issue(results.loaded, "Con+R-Con", Coverage(0.1), 0.8)
    loaded = LoadedRun(Run(ARCHIVE), torch.device("cpu"))
    evaluation = RejectorEvaluation.of(loaded)
    records = [r for r in loaded.run.records("test") if r.label in ("clean", "pgd-100")]
    scored = [evaluation.score_record(record) for record in records]
    archived = ScoredRun(loaded, evaluation, scored)
    return Pages(
        write_page([results], folder / "one.html"),
        write_page([results, plain], folder / "two.html"),
        write_page([archived], folder / "archive.html"),
        results,
        archived,
    )


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "DEMUR_REQUIRE_BROWSER=1, but no chromium is installed"
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as play:
        launched = play.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def shared(browser: "Browser", pages: Pages) -> "Iterator[Tab]":
    tab = Tab(browser, pages.one)
    yield tab
    tab.page.close()


@pytest.fixture
def page(shared: "Tab") -> "Iterator[Page]":
    """The page of one run, at confidence and R-Con without thresholds."""
    for number in range(100):  # a loaded machine takes more than the usual 50 ms
        if number % 20 == 0:  # the page may write the address of its last view once more
            shared.page.evaluate("location.hash = ''")
            shared.page.evaluate(f"location.hash = '#attack={ATTACK}&score=R-Con&t=,'")
        shared.page.wait_for_timeout(50)
        if figures(shared.page)["rule"].startswith(f"{ATTACK}: Every image is accepted"):
            break
    assert figures(shared.page)["rule"].startswith(f"{ATTACK}: Every image is accepted")
    yield shared.page
    assert shared.errors == []


class Tab:
    """A page of the browser; closing it checks that it logged no error."""

    def __init__(self, browser: "Browser", path: Path | str, **options: Any) -> None:
        self.errors: list[str] = []
        self.page: Page = browser.new_page(**options)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.goto(path if isinstance(path, str) else path.as_uri())

    def __enter__(self) -> "Page":
        return self.page

    def __exit__(self, *_: object) -> None:
        self.page.close()
        assert self.errors == []


def slide(page: "Page", name: str, value: float) -> None:
    """Move a slider as a pointer does."""
    page.evaluate(
        "([id, v]) => { const e = document.getElementById(id); e.value = v;"
        " e.dispatchEvent(new Event('input', {bubbles: true})); }",
        [name, value],
    )


def press(page: "Page", group: str, name: str) -> None:
    page.locator(f"#buttons [aria-label='{group}'] button", has_text=re.compile(f"^{name}")).click()


def figures(page: "Page", panel: int = 0) -> dict[str, str]:
    """Every figure of a panel, by name."""
    return page.evaluate(  # type: ignore[no-any-return]
        """(i) => { const found = {}, panel = document.querySelectorAll('.panel')[i];
        for (const e of panel.querySelectorAll('[data-figure]'))
          found[e.dataset.figure] = e.textContent;
        for (const r of panel.querySelectorAll('[data-row]'))
          found[r.dataset.row] = [...r.querySelectorAll('td')].map((c) => c.textContent).join(' ');
        for (const r of panel.querySelectorAll('[data-attack]'))
          found[r.dataset.attack] = [...r.children].slice(1).map((c) => c.textContent).join(' ');
        found.rule = panel.querySelector('.rule').textContent;
        return found; }""",
        panel,
    )


def share(k: int, n: int) -> str:
    lo, hi = metrics.wilson(k, n)
    return f"{percent(k / n if n else 0.0)}% [{percent(lo)}, {percent(hi)}]"


def expected(
    accepted: BoolArray, correct: BoolArray, first: FloatArray, second: FloatArray
) -> dict[str, str]:
    """The figures of a panel by the library."""
    n, right = len(correct), int(correct.sum())
    good, bad = int((accepted & correct).sum()), int((accepted & ~correct).sum())
    stats = metrics.stats_of_verdicts(accepted, correct)
    assert round(stats.accepted_wrong * n) == bad

    def area(score: FloatArray) -> str:
        lo, hi = metrics.auroc_interval(score, correct)
        return f"{metrics.auroc(score, correct):.3f} [{lo:.3f}, {hi:.3f}]"

    gap = metrics.auroc_difference(second, first, correct)
    value, low, high = (signed(v, 1, 3) for v in gap[:3])
    return {
        "accepted": f"{good:,} {bad:,} {good + bad:,}",
        "rejected": f"{right - good:,} {n - right - bad:,} {n - good - bad:,}",
        "all": f"{right:,} {n - right:,} {n:,}",
        "accepted-wrong": share(bad, n),
        "accuracy": share(good, good + bad) if good + bad else "none accepted",
        "coverage": share(good + bad, n),
        "tpr": share(good, right),
        "auroc-con": area(first),
        "auroc": area(second),
        "auroc-gap": f"{value} [{low}, {high}]",
    }


def columns(results: ScoredRun, record: Record, name: str) -> tuple[FloatArray, FloatArray]:
    of = results.evaluation.score_for
    return values(of("Con", record), record), values(of(name, record), record)


def check(
    page: "Page",
    results: ScoredRun,
    entry: ScoredRecord,
    thresholds: tuple[float, float],
    name: str = "R-Con",
) -> None:
    """Compare every figure of the first panel, and the row of its attack, with the library."""
    record = entry.record
    first, second = columns(results, record, name)
    accepted = (first >= thresholds[0]) & (second >= thresholds[1])
    found, wanted = figures(page), expected(accepted, record.correct, first, second)
    assert {key: found[key] for key in wanted} == wanted
    four = (wanted[key] for key in ("accepted-wrong", "accuracy", "coverage", "tpr"))
    assert found[record.label] == f"{len(record.y):,} {' '.join(four)}"


# ------------------------------------------------------------------ figures equal the library's


def test_statistics_of_the_page_equal_the_librarys_on_random_scores(page: "Page") -> None:
    rng = np.random.default_rng(0)
    cases = []
    for n in (2, 3, 7, 40, 300, 900):
        for digits in (1, 6):
            correct = rng.random(n) < rng.random()
            a, b = (np.round(rng.normal(correct * rng.random(), 1), digits) for _ in range(2))
            cases.append((a, b, correct))
    script = """(cases) => cases.map(([a, b, correct]) => {
        const one = Stats.ranking(a, correct), other = Stats.ranking(b, correct);
        const paper = Stats.paperThreshold(one.levels);
        const limit = Stats.thresholdAtErrors(one.levels, 5);
        return [one.auroc, ...one.interval, ...Stats.difference(one, other),
                Stats.thresholdAtTpr(one.groups), a.filter((v) => v >= paper).length,
                a.filter((v, i) => v >= limit && !correct[i]).length]; })"""
    sent = [[a.tolist(), b.tolist(), c.astype(int).tolist()] for a, b, c in cases]
    found = page.evaluate(f"(text) => ({script})(JSON.parse(text))", json.dumps(sent))
    ties = [12.25, 12.35, 0.5, 2.5, -0.125, 33.05, 1e-9, 99.95, 0.0005]
    fixed = page.evaluate("(xs) => xs.map((x) => Stats.fixed(x, 1))", ties)
    assert fixed == [f"{x:.1f}" for x in ties]
    for (a, b, correct), (*areas, at_tpr, paper, errors) in zip(cases, found, strict=True):
        gap = metrics.auroc_difference(a, b, correct)
        wanted = (metrics.auroc(a, correct), *metrics.auroc_interval(a, correct), *gap[:3])
        assert areas == pytest.approx(wanted, abs=1e-9)
        if correct.any():
            assert at_tpr == metrics.threshold_at_tpr(a, correct)
        assert paper == metrics.paper_stats(a, correct).accepted
        assert errors <= 5
        rejected_errors = a[~correct & (a < np.inf)]
        assert errors == max(
            int((rejected_errors >= t).sum())
            for t in [*a, np.inf]
            if int((rejected_errors >= t).sum()) <= 5
        )


def test_after_each_slider_the_figures_are_the_librarys(page: "Page", pages: Pages) -> None:
    slide(page, "t1-0", 0.45)
    check(page, pages.results, pages.scored, (-np.inf, 0.45))
    slide(page, "t0-0", 0.6)
    check(page, pages.results, pages.scored, (0.6, 0.45))
    slide(page, "t1-0", 0)
    check(page, pages.results, pages.scored, (0.6, -np.inf))
    page.fill(".panel .exact >> nth=1", "0.7125")
    page.keyboard.press("Enter")
    check(page, pages.results, pages.scored, (0.6, 0.7125))


def test_the_temperature_changes_con_and_rcon_as_in_the_library(page: "Page", pages: Pages) -> None:
    record = pages.scored.record
    slide(page, "t1-0", 0.4)
    for power in (1.5, -1.0):
        slide(page, "tau", power)
        tau = float(f"{2**power:.3f}")
        first, second = (score(record.output, tau).double().numpy() for score in (con, rcon))
        wanted = expected(second >= 0.4, record.correct, first, second)
        found = figures(page)
        assert {key: found[key] for key in wanted} == wanted
        assert page.text_content("#tau-value") == f"{tau:g}"
        inputs = outputs_at(record, tau)
        inside = int(theorem1(inputs).premise.sum())
        words = page.text_content(".panel .theory") or ""
        assert f"The median xi is {np.median(inputs.xi):.3f}" in words
        assert f"Theorem 1 covers {inside} of {len(record.y)} images" in words
    page.click("#tau-reset")
    check(page, pages.results, pages.scored, (-np.inf, 0.4))


def test_any_scored_rejector_can_be_chosen(page: "Page", pages: Pages) -> None:
    record = pages.scored.record
    for name in ("Energy", "KD", "Con+R-Con", "Margin", "GDA"):
        page.select_option("#score", name)
        check(page, pages.results, pages.scored, (-np.inf, -np.inf), name)
        press(page, f"thresholds of {name}", "TPR-95$")
        threshold = pages.results.evaluation.thresholds[name]
        check(page, pages.results, pages.scored, (-np.inf, float(np.float32(threshold))), name)
        slide(page, "t1-0", 0.5)
        _, second = columns(pages.results, record, name)
        unit = name in ("Con+R-Con", "Margin")
        at = 0.5 if unit else np.sort(second.astype(np.float32))[len(second) // 2]
        check(page, pages.results, pages.scored, (-np.inf, at), name)


def test_buttons_set_the_thresholds_of_the_rows(page: "Page", pages: Pages) -> None:
    results, entry = pages.results, pages.scored
    first, _ = columns(results, entry.record, "R-Con")
    for name in ("Con", "R-Con"):
        press(page, f"thresholds of {name}", "TPR-95$")
        row = next(r for r in entry.rows if (r.rejector, r.protocol) == (name, "deploy"))
        assert figures(page)["accepted-wrong"] == share(
            round(row.point.accepted_wrong * row.point.n), row.point.n
        )
        press(page, f"thresholds of {name}", "TPR-95, paper")
        row = next(r for r in entry.rows if (r.rejector, r.protocol) == (name, "paper"))
        assert figures(page)["accepted"].endswith(f" {row.point.accepted}")
        page.fill("#errors", "5")
        press(page, f"thresholds of {name}", "limit errors")
        wrong = int(figures(page)["accepted"].split()[1])
        assert wrong <= 0.05 * len(first)
    press(page, "other rules", "paper's coupled rule")
    xi = float(np.median(outputs_at(entry.record, 1.0).xi))
    check(page, results, entry, (1 / (2 - xi), 0.5))
    certified = retests(results.loaded, results.evaluation.scores, [entry.record])
    assert certified
    for made, tests in certified:
        press(page, "other rules", f"certified coverage .*, {re.escape(made.rejector)}$")
        coverage = figures(page)["coverage"].split("%")[0]
        assert coverage == percent(tests[0].coverage)
    press(page, "other rules", "accept all")
    check(page, results, entry, (-np.inf, -np.inf))


def test_an_archive_of_cifar10_needs_neither_weights_nor_data(
    browser: "Browser", pages: Pages
) -> None:
    entry = next(e for e in pages.archived.scored if e.record.label == "pgd-100")
    with Tab(browser, pages.archive) as page:
        page.select_option("#attack", "pgd-100")
        slide(page, "t1-0", 0.3)
        slide(page, "t0-0", 0.45)
        check(page, pages.archived, entry, (0.45, 0.3))
        assert page.is_disabled("#tau")
        assert "this record holds scores without logits" in page.inner_text("#tau-note")
        page.click("#next")
        assert "the record stores no images" in page.inner_text("#no-pixels")
        press(page, "thresholds of R-Con", "limit errors")
        for other in pages.archived.scored:  # one rule under every attack
            first, second = columns(pages.archived, other.record, "R-Con")
            link = dict(part.split("=") for part in settled_hash(page).lstrip("#").split("&"))
            t = float(link["t"].replace("%2C", ",").split(",")[1])
            bad = int(((second >= t) & ~other.record.correct).sum())
            assert share(bad, len(first)) in figures(page)[other.record.label]


# ------------------------------------------------------------------ links, keyboard, sizes


def settled_hash(page: "Page") -> str:
    """The address after the last change was written to it."""
    page.wait_for_timeout(200)
    return str(page.evaluate("location.hash"))


def test_a_link_restores_the_view(browser: "Browser", pages: Pages) -> None:
    with Tab(browser, pages.two) as page:
        page.select_option("#score", "Energy")
        page.select_option("#attack", "clean")
        press(page, "thresholds of Energy", "TPR-95$")
        slide(page, "t0-1", 0.35)
        slide(page, "tau", 1.0)
        page.click("#next")
        link, before = settled_hash(page), [figures(page, panel) for panel in (0, 1)]
        words = page.inner_text("#image-why")
    with Tab(browser, pages.two.as_uri() + link) as page:
        assert [figures(page, panel) for panel in (0, 1)] == before
        assert page.inner_text("#image-why") == words
        assert settled_hash(page) == link
        page.evaluate("location.hash = '#attack=nonsense&score=&t=a,b;&image=x&tau=-1'")
        page.wait_for_timeout(50)
        assert figures(page)["rule"]


def test_everything_can_be_reached_and_used_by_keyboard(page: "Page", pages: Pages) -> None:
    wanted = page.evaluate(
        "[...document.querySelectorAll('#explorer :is(select, input, button)')]"
        ".filter((e) => !e.disabled).length"
    )
    seen, unlabelled = set(), []
    page.focus("#attack")
    page.keyboard.press("Shift+Tab")
    for _ in range(45):
        page.keyboard.press("Tab")
        at, label = page.evaluate(
            """() => { const e = document.activeElement;
            const all = [...document.querySelectorAll('#explorer :is(select, input, button)')];
            return [all.indexOf(e), e.labels?.length || e.textContent.trim()
                    || e.getAttribute('aria-label') || '']; }"""
        )
        if at >= 0:
            seen.add(at)
            unlabelled += [] if label else [at]
    assert (len(seen), unlabelled) == (wanted, [])
    page.focus("#t1-0")
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    check(page, pages.results, pages.scored, (-np.inf, 0.003))
    page.focus("#buttons [aria-label='thresholds of Con'] button")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "TPR-95"
    page.wait_for_timeout(650)
    assert page.text_content("#announce") == figures(page)["rule"]


def test_it_fits_a_phone_and_draws_in_both_colour_schemes(browser: "Browser", pages: Pages) -> None:
    blank = """[...document.querySelectorAll('.panel canvas, #curves canvas')].filter((c) =>
        !c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v)).length"""
    for path, scheme in ((pages.one, "light"), (pages.two, "dark"), (pages.archive, "dark")):
        options = {"viewport": {"width": 390, "height": 800}, "color_scheme": scheme}
        with Tab(browser, path, **options) as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            assert page.evaluate(blank) == 0


def test_it_prints(browser: "Browser", pages: Pages) -> None:
    with Tab(browser, pages.one, color_scheme="dark") as page:
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)"
        )
        assert page.is_hidden("#controls")
        assert page.pdf(format="A4").startswith(b"%PDF")


# ------------------------------------------------------------------ one image


def test_one_image_shows_pixels_probabilities_and_the_reason(page: "Page", pages: Pages) -> None:
    record, results = pages.scored.record, pages.results
    first, second = columns(results, record, "R-Con")
    slide(page, "t1-0", 0.5)
    page.select_option("#group", "rejected-wrong")
    page.click("#next")
    i = int(np.flatnonzero((second < 0.5) & ~record.correct)[0])
    predicted = int(prediction(record.output)[i])
    index, label = int(record.arrays["index"][i]), int(record.y[i])
    words = page.inner_text("#image-words")
    assert words == f"Image {index}, {ATTACK}: true class {label}, predicted {predicted}."
    why = page.inner_text("#image-why")
    assert why.startswith(f"Rejected, wrong: confidence {first[i]:.3f}, any is accepted; R-Con")
    assert "< 0.500" in why
    top = page.inner_text("#probabilities tbody tr >> nth=0")
    assert f"{predicted}" in top.split()[0]
    assert f"{100 * first[i]:.1f}%" in top
    shown = page.evaluate(
        "['before', 'after'].map((id) => { const c = document.getElementById(id);"
        " return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
        ".filter((_, k) => k % 4 === 0); })"
    )
    clean = results.loaded.splits["test"].batch(slice(i, i + 1))[0]
    for bytes_, pixels in zip(shown, (clean[0], record.arrays["x_adv"][i]), strict=True):
        assert bytes_ == np.round(255 * pixels.numpy().ravel()).astype(int).tolist()
    alone = int(np.argmin(second))  # no other point is as low
    box = page.locator(".panel canvas").first.bounding_box()
    assert box is not None
    x = 46 + first[alone] / 1.02 * (box["width"] - 46 - 12)  # the margins of the plot
    y = box["height"] - 40 - second[alone] / 1.02 * (box["height"] - 12 - 40)
    page.locator(".panel canvas").first.click(position={"x": x, "y": y})
    assert page.inner_text("#image-words").startswith(f"Image {record.arrays['index'][alone]},")


# ------------------------------------------------------------------ size and speed


def big_data() -> dict[str, Any]:
    """Random scores of 10,000 images under five attacks with fifteen rejectors, and images."""
    rng = np.random.default_rng(0)
    n, names = 10_000, ["Con", "R-Con", *(f"score {k}" for k in range(13))]
    unit = {"kind": "fixed", "unit": True}
    scores = dict.fromkeys(names, unit) | {"T-Con (oracle)": unit}
    scores |= {"Con": {"kind": "con", "tau": 1, "unit": True}}
    scores |= {"R-Con": {"kind": "rcon", "tau": 1, "unit": True}}

    def record(k: int) -> dict[str, Any]:
        pixels = rng.integers(0, 256, (81, 3, 32, 32))
        return {
            "attack": f"attack {k}", "clean": k == 0, "n": n, "no_images": "", "no_logits": "",
            "correct": packed(rng.random(n) < 0.5, "u1"),
            "y": packed(rng.integers(0, 10, n), "<u2"),
            "predicted": packed(np.zeros(n), "<u2"), "index": packed(np.arange(n), "<i4"),
            "scores": {name: packed(rng.random(n), "<f4") for name in scores},
            "logits": packed(rng.normal(size=(n, 10)), "<f4"),
            "a": packed(rng.normal(size=n), "<f4"),
            "attacked": {"count": 81, "pixels": packed(pixels, "u1")},
        }  # fmt: skip

    run = {"name": "big", "epochs": 1, "trained": True, "training": [], "level": 0.95}
    clean = {"count": 81, "shape": [3, 32, 32], "pixels": record(0)["attacked"]["pixels"]}
    return {"runs": [run | {
        "scores": scores, "cal": None, "certificates": [], "clean_images": clean,
        "records": [record(k) for k in range(5)], "worst": [],
    }]}  # fmt: skip


def test_ten_thousand_images_fit_the_page_and_every_slider_is_fast(
    browser: "Browser", pages: Pages, tmp_path: Path
) -> None:
    text = pages.one.read_text(encoding="utf-8")
    data = re.compile(r'(<script type="application/json" id="data">).*?(</script>)', re.S)
    page_bytes = data.sub(lambda m: m[1] + json.dumps(big_data()) + m[2], text)
    path = tmp_path / "big.html"
    path.write_text(page_bytes, encoding="utf-8")
    assert path.stat().st_size <= MOST_BYTES
    with Tab(browser, path) as page:
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})  # CPU, not a busy machine
        for name, steps in (("t0-0", 0.07), ("t1-0", 0.05), ("tau", 0.2)):
            before = task_ms(session)
            for k in range(1, 9):
                slide(page, name, k * steps)
            assert (task_ms(session) - before) / 8 < MOST_MS, name


def task_ms(session: "CDPSession") -> float:
    """CPU time of the page's tasks so far: script, layout and paint."""
    found = session.send("Performance.getMetrics")["metrics"]
    return 1000 * float(next(one["value"] for one in found if one["name"] == "TaskDuration"))


def test_the_page_holds_what_it_says(pages: Pages) -> None:
    """32-bit scores and 8-bit images, in the order of the record."""
    text = html.unescape(pages.one.read_text(encoding="utf-8"))
    found = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert found is not None
    run = json.loads(found[1])["runs"][0]
    record = next(entry for entry in run["records"] if entry["attack"] == ATTACK)
    scores = np.frombuffer(base64.b64decode(record["scores"]["R-Con"]), "<f4")
    _, second = columns(pages.results, pages.scored.record, "R-Con")
    assert np.array_equal(scores, second.astype(np.float32))
    assert "rounded to 32-bit floats; images are rounded to 8 bits" in text
