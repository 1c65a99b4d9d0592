"""Records as tables, the plots of demur.plot, and the two notebooks of the documentation."""

import json
import os
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

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


def test_a_table_of_an_archive_reads_stored_scores_and_converts_to_arrow() -> None:
    records = Run(ARCHIVE).records("test")
    arrow = records.to_arrow()
    assert {"attack", "index", "y", "correct", "Con", "R-Con", "T-Con"} <= set(arrow.column_names)
    assert "predicted" not in arrow.column_names
    first = arrow.column("R-Con").to_numpy()[: len(records[0].y)]
    assert np.array_equal(first, records[0].stored_scores["RCon(tau=1.0)"].double().numpy())


@pytest.mark.parametrize("name", ["pandas", "pyarrow"])
def test_a_missing_extra_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    records = Run(ARCHIVE).records("test")
    convert = records.to_pandas if name == "pandas" else records.to_arrow
    with pytest.raises(BadInput, match=rf"this needs {name}; .*demur\[notebook\]"):
        convert()


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


def test_plots_raise_for_wrong_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="there is no score to draw"):
        plot.risk_coverage({}, [True])
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
