"""The list of cells that differ from the paper, and Table 7 computed a second time."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from demur.paper.cells import Cell, _metric
from demur.paper.pages import disagreement_section, disagreements, number_text
from demur.runs import Record
from demur.runs.record import read_record

RESULTS = Path(__file__).parent.parent / "results"
PUBLISHED_ADAPTIVE = {
    "pgdat-snet": (16.0, 2.00),
    "pgdat-ebd": (18.1, 2.26),
    "pgdat-rr": (21.4, 3.38),
}


def cell(measured: float, published: float, column: str = "x, TPR-95", **other: object) -> Cell:
    fields = {"table": 2, "row": "net", "protocol": "110 epochs, seed 0"} | other
    return Cell(column=column, published=published, measured=measured, **fields)  # type: ignore[arg-type]


def test_small_differences_and_missing_cells_are_not_listed() -> None:
    near = [cell(50.0, 51.4), cell(0.70, 0.71, "x, AUC"), Cell(2, "net", "x, TPR-95", 50.0)]
    assert disagreements(near) == []
    assert disagreement_section(near) == ""


@pytest.mark.parametrize(
    ("one", "status", "cause"),
    [
        (cell(18.0, 35.0, variants={"ten steps": 34.2}), "shown", "ten steps: 34.2"),
        (cell(18.0, 35.0, variants={"ten steps": 30.0}), "likely", "ten steps: 30.0"),
        (cell(18.0, 35.0, variants={"ten steps": 20.0}), "open", ""),
        (cell(50.0, 53.0, protocol="20 epochs, seed 0"), "likely", "fewer epochs"),
        (cell(0.0, 51.7, protocol="20 epochs, seed 0"), "open", ""),  # epochs do not explain this
        (cell(55.0, 51.0, protocol="20 epochs, seed 0"), "open", ""),  # ours is higher
        (cell(math.nan, 0.637, "x, AUC"), "open", "no prediction is correct"),
    ],
)
def test_a_cause_is_claimed_only_with_evidence(one: Cell, status: str, cause: str) -> None:
    (row,) = disagreements([one])
    assert (row.status, row.cause) == (status, cause)


def test_a_cause_shown_in_another_row_is_likely_for_gaps_as_large() -> None:
    shown = cell(18.0, 35.0, variants={"ten steps": 34.2})
    alike, larger = cell(16.0, 34.0, row="alike"), cell(0.0, 45.0, row="larger")
    rows = disagreements([shown, alike, larger])
    assert [row.status for row in rows] == ["shown", "likely", "open"]
    assert rows[1].cause == "ten steps, as in net"
    assert disagreements([alike])[0].status == "open"


def test_the_section_counts_what_it_lists() -> None:
    text = disagreement_section([cell(18.0, 35.0, variants={"ten steps": 34.2}), cell(9.0, 1.0)])
    assert "each of the 2 measured cells" in text
    assert "1 shown, 0 likely, 1 open" in text
    assert "| 2 | net | x, TPR-95 | 18.0 | 35.0 | -17.0 | shown | ten steps: 34.2 |" in text


def test_undefined_numbers_are_named() -> None:
    arrays = {"y": torch.zeros(5, dtype=torch.long), "correct": torch.zeros(5, dtype=torch.bool)}
    score = np.arange(5.0)
    assert math.isnan(_metric("auroc", score, Record(arrays, {})))
    assert _metric("tpr95", score, Record(arrays, {})) == 0, "no accepted prediction is correct"
    assert number_text(math.nan, "x, AUC") == "undefined"
    assert json.loads(json.dumps(cell(math.nan, 0.6).to_json()))["measured"] == "undefined"


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("net", PUBLISHED_ADAPTIVE)
def test_adaptive_distances_of_table_7_from_the_files(net: str, norm: str) -> None:
    """The authors average over all images; where the adaptive attack fails, normal C&W counts."""
    folder = RESULTS / "brief-cifar10" / f"{net}-seed0" / "records"
    middle = "-linf" if norm == "linf" else ""
    size = {}
    for name in (f"cw{middle}-test", f"cw-adaptive{middle}-test"):
        (path,) = folder.glob(f"{name}-*.npz")
        size[name] = read_record(path).arrays[f"size_{norm}"].double().numpy()
    normal, adaptive = size.values()
    mean = sum(
        (255 * a if norm == "linf" else a * a) if a else (255 * n if norm == "linf" else n * n)
        for a, n in zip(adaptive, normal, strict=True)
    ) / len(normal)
    linf, l2 = PUBLISHED_ADAPTIVE[net]
    assert mean == pytest.approx(
        linf if norm == "linf" else l2, abs=0.05 if norm == "linf" else 0.005
    )
    page = (RESULTS.parent / "RESULTS.md").read_text()
    label = {"pgdat-snet": "PGD-AT, SNet", "pgdat-ebd": "PGD-AT, EBD", "pgdat-rr": "PGD-AT, RR"}[
        net
    ]
    line = page[page.index("## Table 7") :].split(f"| {label} | ")[1].splitlines()[0].split(" | ")
    shown = line[1 if norm == "linf" else 3].split()[0]
    assert shown == (f"{mean:.1f}" if norm == "linf" else f"{mean:.2f}")
