"""Records as tables, the plots of demur.plot, and the two notebooks of the documentation."""

import json
import os
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes

mpl.use("Agg")

from demur import metrics, plot
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RejectorEvaluation, values
from demur.output import prediction
from demur.runs import Run
from tests import forked

ROOT = Path(__file__).parents[1]
ARCHIVE = ROOT / "results" / "cifar10-pgdat-rr-short-seed0"


def test_a_table_has_every_score_that_needs_no_fitting(scored_source: LoadedRun) -> None:
    records = scored_source.run.records("test")
    table = records.to_pandas()
    evaluation = RejectorEvaluation.of(scored_source)
    assert len(table) == sum(len(record.y) for record in records)
    for record in records:
        part = table[table["attack"] == record.label]
        assert part["correct"].tolist() == record.correct.tolist()
        assert part["predicted"].tolist() == prediction(record.output).tolist()
        for name in ("Con", "R-Con", "Con+R-Con", "Energy"):
            assert np.array_equal(part[name], values(evaluation.scores[name], record))
    assert "KD" not in table.columns


def test_a_table_of_an_archive_reads_stored_scores() -> None:
    records = Run(ARCHIVE).records("test")
    table = records.to_pandas()
    assert {"attack", "index", "y", "correct", "Con", "R-Con", "T-Con"} <= set(table.columns)
    assert "predicted" not in table.columns
    first = table["R-Con"].to_numpy()[: len(records[0].y)]
    assert np.array_equal(first, records[0].stored_scores["RCon(tau=1.0)"].double().numpy())


def test_a_missing_extra_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    records = Run(ARCHIVE).records("test")
    with pytest.raises(BadInput, match=r"this needs pandas; .*demur\[notebook\]"):
        records.to_pandas()


def test_plots_draw_the_figures_of_the_metrics() -> None:
    rng = np.random.default_rng(0)
    correct = rng.random(200) < 0.7
    con = np.clip(rng.normal(0.5 + 0.2 * correct, 0.2), 0.1, 1)
    rcon = con * rng.random(200)
    curve = metrics.risk_coverage(con, correct)
    axes = plot.risk_coverage({"Con": con, "R-Con": rcon}, correct)
    drawn = axes.lines[0].get_xydata()
    assert np.array_equal(drawn, 100 * np.stack([curve.coverage, curve.risk], 1))
    axes = plot.scatter(con, rcon, correct, thresholds=(0.5, 0.4), xi=0.5)
    assert len(np.asarray(axes.collections[0].get_offsets())) == correct.sum()
    assert np.asarray(axes.lines[0].get_xdata())[0] == pytest.approx(1 / 1.5)
    axes = plot.reliability(con, correct, bins=10)
    assert axes.get_title() == f"expected calibration error {metrics.ece(con, correct, 10):.3f}"
    weights = [np.ceil(con * 10) == k for k in range(1, 11)]
    heights = [
        bar.get_extents().transformed(axes.transData.inverted()).height for bar in axes.patches
    ]
    assert heights == pytest.approx([correct[w].mean() for w in weights if w.any()])
    axes = plot.separability(np.append(con, -np.inf), np.append(correct, False))
    area = metrics.auroc(np.append(con, -np.inf), np.append(correct, False))
    assert axes.get_title() == f"AUROC {area:.3f}"
    assert plot.separability(con, correct, ax=axes) is axes
    mpl.pyplot.close("all")


def legend(axes: Axes) -> list[str]:
    found = axes.get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def test_curves_have_bands_and_areas() -> None:
    rng = np.random.default_rng(1)
    correct = rng.random(500) < 0.6
    score = rng.normal(correct, 1)
    axes = plot.risk_coverage({"Con": score}, correct)
    assert legend(axes) == [f"Con, AURC {metrics.aurc(score, correct):.3f}"]
    curve = metrics.risk_coverage(score, correct)
    corners = axes.collections[0].get_paths()[0].vertices
    lo, hi = metrics.wilson(round(curve.risk[-1] * 500), 500)
    assert np.isclose(np.asarray(corners), [100, 100 * lo]).all(1).any()
    assert np.isclose(np.asarray(corners), [100, 100 * hi]).all(1).any()
    axes = plot.roc({"Con": score, "const": np.ones(500)}, correct)
    x, y = np.asarray(axes.lines[0].get_xydata(), dtype=float).T
    area = (np.diff(x) * (y[1:] + y[:-1]) / 2).sum() / 1e4
    assert area == pytest.approx(metrics.auroc(score, correct))
    assert legend(axes)[1] == "const, AUROC 0.500"
    plot.roc({"Con": score[correct]}, np.ones(correct.sum(), bool))  # nothing is wrong
    rows = np.array([[90.0, 60], [94, 50], [92, 58]])
    axes = plot.seeds([0, 0.1], {"R-Con": rows, "one seed": [80, 70]}, ylabel="accepted errors (%)")
    assert np.allclose(np.asarray(axes.lines[0].get_ydata()), rows.mean(0))
    assert len(axes.collections) == 1
    assert (
        np.isclose(np.asarray(axes.collections[0].get_paths()[0].vertices), [0, 92 - 2])
        .all(1)
        .any()
    )
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("eps", "accepted errors (%)")
    mpl.pyplot.close("all")


def test_a_scatter_clips_nothing_in_silence() -> None:
    x, y, correct = [-3.0, 0.2, 9, -np.inf], [0.1, 0.2, 0.9, 0.5], [True, False, True, True]
    axes = plot.scatter(x, y, correct, thresholds=(0, 0.15), names=("Energy", "Con"))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Energy", "Con")
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert left < -3 and right > 9 and low <= 0.1 and high >= 0.9
    assert axes.get_title() == "1 of 4 images have an infinite score, not shown"
    assert legend(axes)[0] == "correct (2)"
    mpl.pyplot.close("all")


def test_figures_are_saved_in_one_style(tmp_path: Path) -> None:
    with mpl.rc_context({"axes.spines.top": True, "svg.fonttype": "path"}):
        for ending, start in (("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")):
            contents = []
            for _ in range(2):
                axes = plot.separability([0.1, 0.2, 0.4], [True, False, True])
                assert not axes.spines["top"].get_visible()
                plot.save(axes, tmp_path / f"figure.{ending}")
                contents.append((tmp_path / f"figure.{ending}").read_bytes())
            assert contents[0] == contents[1]
            assert contents[0].startswith(start)
    assert ">AUROC" in (tmp_path / "figure.svg").read_text(), "text stays text"
    (tmp_path / "other.pdf").write_text("mine")
    with pytest.raises(BadInput):
        plot.save(axes, tmp_path / "other.pdf")
    mpl.pyplot.close("all")


def test_plots_raise_for_wrong_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for draw in (plot.risk_coverage, plot.roc):
        with pytest.raises(BadInput, match="there is nothing to draw"):
            draw({}, [True])
    with pytest.raises(BadInput, match="the numbers of images differ"):
        plot.seeds([1, 2], {"Con": [1, 2, 3]})
    axes = plot.roc({"Con": [0.1, 0.2]}, [True, False])
    for path in ("figure.txt", "figure"):
        with pytest.raises(BadInput, match=r"is no \.pdf, \.svg or \.png file"):
            plot.save(axes, path)
    with pytest.raises(BadInput, match="every score is infinite"):
        plot.separability([-np.inf, np.inf], [True, False])
    with pytest.raises(BadInput, match="probabilities, not logits"):
        plot.reliability([3.0], [True])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BadInput, match=r"demur\.plot needs matplotlib"):
        plot.separability([0.1, 0.2], [True, False])


@pytest.mark.parametrize("path", sorted((ROOT / "docs/notebooks").glob("*.ipynb")), ids=str)
def test_the_code_of_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    """Without the kernel's own commands; notebooks are stored with their output."""
    text = path.read_text(encoding="utf-8")
    assert '"image/png"' in text, f"{path} is not executed"
    sources = ["".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    lines = "\n".join(sources).splitlines()
    code = "\n".join(line for line in lines if not line.startswith("%"))
    env = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    done = forked.run(["-c", code], tmp_path, env)
    assert done.returncode == 0, done.stderr[-2000:]
