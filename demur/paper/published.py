"""The paper's thirteen tables: rows, columns, published numbers, and what measures each cell.

    PAPER_TABLES[2].rows[0].values      # (82.59, 0.618, 53.12, 0.588, ...)

A row names the net (an entry such as "pgdat-rr" and changes of its recipe) and the rejector.
A column names the attacks that may fill it, the paper's own first, and the metric.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import numpy as np

from demur.data.corruptions import CORRUPTIONS
from demur.errors import BadInput, suggestion

Metric = Literal[
    "accuracy", "tpr95", "auroc", "distance",  # of the paper
    "tpr95_by_severity", "auroc_reversed", "distance_of_broken", "broken",  # of other ways
    "epoch_seconds", "megabytes",  # of a training and of its net
]  # fmt: skip
HEAD = ""  # the rejector that the head of the net is trained for
ORACLE = "T-Con (oracle)"
_NOT_IN_PAPER = ("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "pixelate")
PAPER_CORRUPTIONS = tuple(name for name in CORRUPTIONS if name not in _NOT_IN_PAPER)  # table 3


class Column(NamedTuple):
    """One column of a table."""

    label: str
    attacks: tuple[str, ...]  # names and changes, as `demur attack` takes them
    metric: Metric
    rejector: str | None = None  # instead of the row's
    changes: tuple[str, ...] = ()  # of the row's recipe


class PaperRow(NamedTuple):
    """One row of a table."""

    label: str
    entry: str
    rejector: str
    values: tuple[float, ...]
    changes: tuple[str, ...] = ()  # of the entry's recipe
    attacks: tuple[str, ...] = ()  # instead of the column's


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper, or results of its text as a table."""

    number: int | str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[PaperRow, ...]
    changes: tuple[str, ...] = ()  # of every recipe
    notes: str = ""

    @property
    def heading(self) -> str:
        """Number and title."""
        place = "In the text" if isinstance(self.number, str) else f"Table {self.number}"
        return f"{place}: {self.title}"

    def cells(self) -> Iterator[tuple[PaperRow, Column, float]]:
        """Every row and column with its published number."""
        for row in self.rows:
            for column, value in zip(self.columns, row.values, strict=True):
                yield row, column, value


def rows_of(tables: Iterable[PaperTable], entries: Sequence[str]) -> list[PaperTable]:
    """The tables with only the rows of these nets, without tables that have none of them.

    Raises BadInput for a net that is in no table.
    """
    tables = list(tables)
    known = list(dict.fromkeys(row.entry for table in tables for row in table.rows))
    for entry in entries:
        if entry not in known:
            raise BadInput(f"these tables have no net {entry!r}; {suggestion(entry, known)}")
    chosen = [
        replace(table, rows=tuple(row for row in table.rows if row.entry in entries))
        for table in tables
    ]
    return [table for table in chosen if table.rows]


def _pairs(*columns: tuple[str, tuple[str, ...]]) -> tuple[Column, ...]:
    """TPR-95 and AUC of each attack."""
    metrics: tuple[tuple[str, Metric], ...] = (("TPR-95", "tpr95"), ("AUC", "auroc"))
    return tuple(
        Column(f"{label}, {name}", attacks, metric)
        for label, attacks in columns
        for name, metric in metrics
    )


CLEAN = ("clean", ("clean",))
PGD_10 = ("PGD-10", ("pgd-10",))
_THREATS_PGD_100 = _pairs(
    CLEAN,
    ("Linf 8/255", ("pgd-100:restarts=10", "pgd-100")),
    ("Linf 16/255", ("pgd-100:restarts=10,eps=16/255", "pgd-100:eps=16/255")),
    ("L2 128/255", ("pgd-100-l2:restarts=10", "pgd-100-l2")),
)
_THREATS_PGD_10 = _pairs(
    CLEAN,
    ("Linf 8/255", ("pgd-10",)),
    ("Linf 16/255", ("pgd-10:eps=16/255",)),
    ("L2 128/255", ("pgd-10-l2",)),
)
_CLEAN_AND_PGD_10 = _pairs(CLEAN, PGD_10)
_PGD_1000 = ("pgd-1000:restarts=10", "pgd-1000")
_WRN = ("net=WideResNet()",)
_CIFAR100 = ("data=CIFAR100()",)


def _rows(text: str, entries: dict[str, tuple[str, str, str]]) -> tuple[PaperRow, ...]:
    """Rows from lines of a key and numbers; `entries` has (label, entry, rejector) by key."""
    rows = []
    for line in text.strip().splitlines():
        key, *numbers = line.split()
        rows.append(PaperRow(*entries[key], tuple(map(float, numbers))))
    return tuple(rows)


_NETS = {
    "kd": ("PGD-AT, KD", "pgdat", "KD"),
    "lid": ("PGD-AT, LID", "pgdat", "LID"),
    "gda": ("PGD-AT, GDA", "pgdat", "GDA"),
    "gda*": ("PGD-AT, GDA*", "pgdat", "GDA*"),
    "gmm": ("PGD-AT, GMM", "pgdat", "GMM"),
    "carl": ("CARL, margin", "pgdat-carl", HEAD),
    "atro": ("ATRO, margin", "pgdat-atro", HEAD),
    "trades": ("TRADES, confidence", "trades", "Con"),
    "ccat": ("CCAT, confidence", "ccat-reference", "Con"),
    "pgdat": ("PGD-AT, confidence", "pgdat", "Con"),
    "snet": ("PGD-AT, SNet", "pgdat-snet", HEAD),
    "ebd": ("PGD-AT, EBD", "pgdat-ebd", HEAD),
    "trades-rr": ("TRADES, RR", "trades-rr", HEAD),
    "ccat-rr": ("CCAT, RR", "ccat-reference-rr", HEAD),
    "pgdat-rr": ("PGD-AT, RR", "pgdat-rr", HEAD),
}

_TABLE_2 = """
kd        82.59 0.618 53.12 0.588 31.97 0.535 64.60 0.599
lid       84.02 0.712 54.92 0.660 32.75 0.621 66.07 0.663
gda       82.35 0.453 52.67 0.461 31.89 0.454 64.13 0.459
gda*      84.51 0.664 53.88 0.589 31.94 0.527 65.71 0.605
gmm       85.44 0.703 54.35 0.607 31.96 0.532 66.54 0.635
carl      85.54 0.682 51.67 0.539 30.41 0.516 65.98 0.645
atro      73.42 0.669 36.04 0.654 21.37 0.644 41.52 0.655
trades    86.07 0.837 57.62 0.774 37.55 0.739 67.88 0.781
ccat      92.44 0.806 51.68 0.637 45.12 0.683 67.07 0.772
pgdat     86.52 0.857 57.30 0.768 34.77 0.685 69.10 0.783
snet      84.19 0.796 56.41 0.730 35.25 0.692 67.49 0.741
ebd       85.34 0.832 57.04 0.763 34.96 0.690 67.82 0.774
trades-rr 86.47 0.849 58.52 0.786 38.06 0.748 68.97 0.793
ccat-rr   94.12 0.909 53.89 0.662 48.02 0.688 67.98 0.785
pgdat-rr  86.91 0.861 58.21 0.776 35.32 0.705 70.24 0.796
"""
_TABLE_3 = """
snet      77.74 75.52 78.72 79.77 75.81 61.32 81.75 42.97 78.59 82.08
ebd       78.47 77.92 80.47 81.17 79.14 61.16 83.98 42.10 80.86 83.34
carl      77.45 74.94 78.00 79.86 74.16 56.09 81.28 40.33 78.17 82.64
atro      55.36 53.74 54.59 50.84 41.12 42.82 50.13 33.54 54.48 56.82
ccat      83.04 85.47 89.33 89.38 88.21 76.32 92.71 55.99 89.34 91.94
trades    79.89 78.48 80.92 78.75 71.61 63.53 80.97 45.22 80.53 84.50
pgdat-rr  80.87 79.42 81.90 81.89 76.95 63.49 84.02 44.03 82.18 85.12
ccat-rr   85.03 86.26 89.83 89.22 88.41 77.45 92.62 58.95 89.59 92.06
trades-rr 80.03 79.15 81.00 80.16 74.18 63.55 82.13 45.99 80.98 84.64
"""
_TABLE_4 = """
snet      55.02 55.79 51.37
ebd       55.40 56.15 53.24
carl      46.17 48.49 44.78
atro      32.53 31.74 28.31
ccat      34.21 49.78 38.01
trades    53.69 56.89 50.88
pgdat-rr  56.18 57.57 54.08
ccat-rr   36.48 51.30 40.72
trades-rr 54.83 57.93 51.48
"""
_TABLE_7 = """
snet     14.30 30.48 0.84 2.70 8.20 23.05 0.56 2.37
ebd      14.70 37.54 0.85 2.42 8.58 25.69 0.60 1.81
pgdat-rr 14.99 38.58 0.87 3.28 8.53 28.67 0.61 3.21
"""
_TABLE_8 = """
snet     55.83 0.725 32.69 0.744
ebd      56.12 0.763 33.35 0.769
pgdat-rr 57.57 0.773 34.48 0.776
"""
_TABLE_11 = """
kd       58.20 0.549 30.23 0.532 16.39 0.510 40.67 0.539
lid      59.49 0.674 31.60 0.668 16.86 0.661 42.01 0.658
gda      57.06 0.416 29.67 0.412 16.17 0.410 39.83 0.416
gda*     58.98 0.599 31.40 0.593 17.04 0.588 42.10 0.596
gmm      58.06 0.518 30.48 0.505 16.69 0.508 40.68 0.511
snet     59.68 0.729 33.12 0.743 19.48 0.759 42.72 0.726
ebd      61.44 0.795 34.56 0.776 20.50 0.762 44.22 0.777
pgdat-rr 64.44 0.837 35.52 0.782 19.89 0.767 47.03 0.802
"""
_TABLE_11_WRN = """
kd       62.04 0.602 32.59 0.573 18.19 0.559 41.66 0.575
lid      63.17 0.705 33.27 0.672 18.97 0.652 42.97 0.672
gda      60.12 0.436 31.64 0.426 17.75 0.421 40.52 0.423
gda*     62.71 0.601 33.79 0.605 18.65 0.575 42.91 0.602
gmm      61.80 0.519 33.33 0.520 18.95 0.529 42.27 0.513
snet     64.09 0.727 36.14 0.738 22.02 0.753 44.32 0.713
ebd      66.83 0.810 37.76 0.775 21.80 0.743 46.80 0.789
pgdat-rr 70.14 0.853 38.81 0.790 22.20 0.765 48.26 0.801
"""
_TABLE_13 = """
kd       85.51 0.759 57.26 0.674 34.87 0.605 67.55 0.695
lid      86.94 0.760 58.53 0.690 35.54 0.642 68.62 0.699
gda      85.10 0.512 56.47 0.506 34.22 0.482 66.79 0.503
gda*     87.16 0.694 57.62 0.627 34.66 0.561 68.23 0.637
gmm      88.36 0.747 57.98 0.650 34.79 0.568 68.87 0.667
snet     88.30 0.803 60.07 0.733 37.63 0.695 70.14 0.730
ebd      89.63 0.860 60.96 0.778 36.92 0.712 70.97 0.792
pgdat-rr 90.74 0.897 61.48 0.783 36.52 0.698 72.00 0.809
"""
_KD_GRID = {0.1: (0.562, 0.545), 0.01: (0.609, 0.581), 0.001: (0.618, 0.587)}
_LID_GRID = {
    100: (0.686, 0.622), 200: (0.699, 0.638), 300: (0.706, 0.648), 400: (0.710, 0.654),
    500: (0.712, 0.658), 600: (0.711, 0.661), 700: (0.709, 0.661), 800: (0.706, 0.660),
    1000: (0.695, 0.653), 2000: (0.603, 0.590),
}  # fmt: skip
_KD_GRID_100 = {
    10.0: (0.522, 0.517), 1.0: (0.549, 0.532), 0.1: (0.500, 0.479), 0.01: (0.473, 0.453),
    0.001: (0.477, 0.457),
}  # fmt: skip
_LID_GRID_100 = {
    10: (0.662, 0.652), 20: (0.674, 0.668), 40: (0.672, 0.667), 60: (0.668, 0.661),
    80: (0.659, 0.652), 100: (0.652, 0.644), 200: (0.615, 0.607), 300: (0.584, 0.578),
    400: (0.559, 0.551), 500: (0.537, 0.529),
}  # fmt: skip
_TEMPERATURES = {  # of the RR loss, as log2
    -1: (86.86, 0.866, 59.11, 0.770),
    -2: (86.62, 0.865, 60.63, 0.762),
    -3: (85.18, 0.868, 61.12, 0.741),
    -4: (80.22, 0.836, 55.15, 0.740),
}
_SNET_GRID = {  # by weight and coverage
    (8, 0.7): (80.57, 53.43, 0.796, 0.730), (8, 0.8): (82.16, 53.90, 0.768, 0.716),
    (8, 0.9): (81.33, 53.82, 0.757, 0.694), (16, 0.7): (81.08, 53.62, 0.792, 0.725),
    (16, 0.8): (81.72, 53.90, 0.782, 0.722), (16, 0.9): (82.21, 54.08, 0.751, 0.701),
    (32, 0.7): (79.98, 53.52, 0.793, 0.716), (32, 0.8): (80.60, 53.71, 0.774, 0.711),
    (32, 0.9): (82.48, 53.86, 0.750, 0.704),
}  # fmt: skip
_EBD_GRID = {(6, 0): (80.71, 52.55, 0.831, 0.768), (6, 3): (81.98, 53.89, 0.832, 0.763)}


def _grid(
    kd: dict[float, tuple[float, float]], lid: dict[int, tuple[float, float]]
) -> tuple[PaperRow, ...]:
    rows = [PaperRow(f"KD, sigma {s:g}", "pgdat", f"KD, sigma {s:g}", v) for s, v in kd.items()]
    rows += [PaperRow(f"LID, K {k}", "pgdat", f"LID, k {k}", v) for k, v in lid.items()]
    return tuple(rows)


def _changed(rows: tuple[PaperRow, ...], changes: tuple[str, ...]) -> tuple[PaperRow, ...]:
    return tuple(row._replace(changes=changes) for row in rows)


_AUROCS = (Column("clean, AUC", ("clean",), "auroc"), Column("PGD-10, AUC", ("pgd-10",), "auroc"))
_TABLES = (
    PaperTable(
        1, "Accuracy on all images and at TPR 95%, by confidence and by T-Con",
        (
            Column("all", (), "accuracy"),
            Column("TPR-95, confidence", (), "tpr95", "Con"),
            Column("TPR-95, T-Con", (), "tpr95", ORACLE),
        ),
        (
            *(
                PaperRow(f"{name}, {inputs}", entry, "Con", values, attacks=attacks)
                for name, entry, (inputs, attacks), values in (
                    ("Standard", "standard", CLEAN, (95.36, 98.40, 100.0)),
                    ("Standard", "standard", PGD_10, (0.22, 0.18, 100.0)),
                    ("Adversarial", "pgdat", CLEAN, (82.67, 87.39, 96.55)),
                    ("Adversarial", "pgdat", PGD_10, (53.58, 57.23, 88.75)),
                )
            ),
        ),
    ),
    PaperTable(
        2, "Rejectors under PGD-100 with 10 restarts, three threat models",
        _THREATS_PGD_100, _rows(_TABLE_2, _NETS),
    ),
    PaperTable(
        3, "TPR-95 accuracy under the corruptions of CIFAR-10-C, one threshold for five severities",
        tuple(Column(name, (f"corruption:name={name}",), "tpr95") for name in PAPER_CORRUPTIONS),
        _rows(_TABLE_3, _NETS),
    ),
    PaperTable(
        4, "TPR-95 accuracy under multi-target and GAMA attacks, Linf 8/255",
        (
            Column("multi-target", ("multi-target", "multi-target:restarts=1"), "tpr95"),
            Column("GAMA-PGD", ("gama-pgd:restarts=1,keep=max_objective",), "tpr95"),
            Column("GAMA-FW", ("gama-fw:restarts=1,keep=max_objective",), "tpr95"),
        ),
        _rows(_TABLE_4, _NETS),
    ),
    PaperTable(
        5, "The temperature of the RR loss",
        _CLEAN_AND_PGD_10,
        tuple(
            PaperRow(f"log2 tau = {log}", "pgdat-rr", HEAD, values, (f"head.tau={2.0**log:g}",))
            for log, values in _TEMPERATURES.items()
        ),
    ),
    PaperTable(
        6, "The construction of R-Con",
        _CLEAN_AND_PGD_10,
        (
            PaperRow("A alone", "pgdat-rr", HEAD, (85.77, 0.844, 56.97, 0.765),
                     ("head.construction=aux",)),
            PaperRow("RR", "pgdat-rr", HEAD, (86.91, 0.861, 58.39, 0.776)),
            PaperRow("confidence alone", "pgdat-rr", HEAD, (86.76, 0.865, 57.42, 0.768),
                     ("head.construction=con",)),
            PaperRow("RR, scored by confidence", "pgdat-rr", "Con", (87.12, 0.868, 58.49, 0.777)),
        ),
    ),
    PaperTable(
        7, "Minimal distortion by C&W: Linf times 255, squared L2",
        tuple(
            Column(f"{data}, {name}", (attack,), "distance", changes=changes)
            for data, changes in (("CIFAR-10", ()), ("CIFAR-100", _CIFAR100))
            for name, attack in (
                ("Linf, normal", "cw-linf"), ("Linf, adaptive", "cw-adaptive-linf"),
                ("L2, normal", "cw"), ("L2, adaptive", "cw-adaptive"),
            )
        ),
        _rows(_TABLE_7, _NETS),
    ),
    PaperTable(
        8, "PGD-1000 with 10 restarts, Linf 8/255",
        (
            *_pairs(("CIFAR-10", _PGD_1000)),
            *(column._replace(changes=_CIFAR100) for column in _pairs(("CIFAR-100", _PGD_1000))),
        ),
        _rows(_TABLE_8, _NETS),
    ),
    PaperTable(9, "Settings of KD and LID on CIFAR-10", _AUROCS, _grid(_KD_GRID, _LID_GRID)),
    PaperTable(
        10, "Settings of KD and LID on CIFAR-100", _AUROCS, _grid(_KD_GRID_100, _LID_GRID_100),
        _CIFAR100,
    ),
    PaperTable(
        11, "Rejectors on CIFAR-100 under PGD-10",
        _THREATS_PGD_10,
        (
            *_rows(_TABLE_11, _NETS),
            *(
                row._replace(label=f"{row.label}, WRN-34-10")
                for row in _changed(_rows(_TABLE_11_WRN, _NETS), _WRN)
            ),
        ),
        _CIFAR100,
    ),
    PaperTable(
        12, "Settings of SelectiveNet and EBD",
        (
            Column("clean, accuracy", ("clean",), "accuracy"),
            Column("PGD-10, accuracy", ("pgd-10",), "accuracy"),
            *_AUROCS,
        ),
        (
            *(
                PaperRow(f"SNet, weight {weight}, coverage {coverage}", "pgdat-snet", HEAD, values,
                         (f"head.weight={weight}", f"head.coverage={coverage}"))
                for (weight, coverage), values in _SNET_GRID.items()
            ),
            *(
                PaperRow(f"EBD, m_in {m_in}, m_out {m_out}", "pgdat-ebd", HEAD, values,
                         (f"head.m_in={m_in}", f"head.m_out={m_out}"))
                for (m_in, m_out), values in _EBD_GRID.items()
            ),
        ),
        notes="The paper's third EBD row, m_in -5 and m_out -23, overflowed and has no number.",
    ),
    PaperTable(
        13, "Rejectors with WRN-34-10 under PGD-10", _THREATS_PGD_10, _rows(_TABLE_13, _NETS), _WRN
    ),
)  # fmt: skip
PAPER_TABLES = {table.number: table for table in _TABLES}

_RADII = {8: 54.40, 16: 33.56, 32: 19.80, 64: 6.71, 128: 0.95}  # in 1/255
TEXT_TABLES = (  # results that the paper gives in its text
    PaperTable(
        "text-autoattack", "PGD-AT with RR under AutoAttack, which returns robust images unchanged",
        (
            Column("all", ("autoattack",), "accuracy"),
            Column("TPR-95", ("autoattack",), "tpr95"),
        ),
        (
            PaperRow("CIFAR-10", "pgdat-rr", HEAD, (48.62, 84.32)),
            PaperRow("CIFAR-100", "pgdat-rr", HEAD, (25.20, 70.99), _CIFAR100),
        ),
    ),
    PaperTable(
        "text-radii", "Accuracy of PGD-AT with RR under PGD-10 as the radius grows",
        tuple(
            Column(f"Linf {eps}/255", (f"pgd-10:eps={eps}/255",), "accuracy") for eps in _RADII
        ),
        (PaperRow("PGD-AT, RR", "pgdat-rr", HEAD, tuple(_RADII.values())),),
    ),
    PaperTable(
        "text-head", "The cost of the RR head: seconds per epoch of training, megabytes of the net",
        (
            Column("ResNet-18, s per epoch", ("clean",), "epoch_seconds"),
            Column("ResNet-18, MB", (), "megabytes"),
            Column("WRN-34-10, MB", (), "megabytes", changes=_WRN),
        ),
        (
            PaperRow("PGD-AT", "pgdat", "Con", (316.0, 44.74, 184.77)),
            PaperRow("PGD-AT, RR", "pgdat-rr", HEAD, (320.0, 45.27, 185.59)),
        ),
        notes="Seconds depend on the machine and compare the rows of one column. The paper gives "
        "none for WRN-34-10, and none for inference.",
    ),
)  # fmt: skip
TABLES_BY_NUMBER = PAPER_TABLES | {table.number: table for table in TEXT_TABLES}


def published_numbers(number: int | str, rows: str | list[str], columns: str | list[str]) -> Any:
    """Published numbers of rows and columns by labels or patterns, in the order of the table.

    Returns an array, or the only number. BadInput is raised for a label that the table lacks.
    """
    cells = [
        (row.label, column.label, value) for row, column, value in TABLES_BY_NUMBER[number].cells()
    ]
    chosen = [
        {name for one in as_list(given) for name in fitting(one, labels)}
        for given, labels in ((rows, [r for r, _, _ in cells]), (columns, [c for _, c, _ in cells]))
    ]
    found = [value for row, column, value in cells if row in chosen[0] and column in chosen[1]]
    return np.array(found) if len(found) > 1 else found[0]


def as_list(one: str | list[str]) -> list[str]:
    """The list, or that of a single text."""
    return [one] if isinstance(one, str) else one


def fitting(pattern: str, names: Iterable[str]) -> list[str]:
    """The name itself, or else the names that fit a pattern such as LID*; BadInput without any."""
    known = [*names]
    found = [pattern] if pattern in known else [one for one in known if fnmatchcase(one, pattern)]
    if not found:
        raise BadInput(f"there is no {pattern!r}; {suggestion(pattern, known)}")
    return found
