"""The published numbers of the paper's tables, shown beside demur's own.

    first_table(("clean", *RADII))["pgdat-rr", "R-Con", "clean"]        # 86.91, 0.861

The paper scores CARL and ATRO by their margin. Its CCAT is that of the reference code.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Figure(NamedTuple):
    """The published numbers of one rejector under one attack."""

    right: float  # accuracy on accepted images at TPR 95, in percent
    auroc: float


PaperFigures = Mapping[tuple[str, str, str], Figure]  # by entry, score and attack
NOTE = (
    "`the paper` is TPR-95 and AUROC of the paper's Table 1: 110 epochs, the checkpoint with the "
    "best result on the test images."
)
# TPR-95 and AUROC for clean, Linf 8/255, Linf 16/255, L2 128/255
_TABLE_1: dict[tuple[str, str], tuple[float, ...]] = {
    ("pgdat", "KD"): (82.59, 0.618, 53.12, 0.588, 31.97, 0.535, 64.60, 0.599),
    ("pgdat", "LID"): (84.02, 0.712, 54.92, 0.660, 32.75, 0.621, 66.07, 0.663),
    ("pgdat", "GDA"): (82.35, 0.453, 52.67, 0.461, 31.89, 0.454, 64.13, 0.459),
    ("pgdat", "GDA*"): (84.51, 0.664, 53.88, 0.589, 31.94, 0.527, 65.71, 0.605),
    ("pgdat", "GMM"): (85.44, 0.703, 54.35, 0.607, 31.96, 0.532, 66.54, 0.635),
    ("pgdat-carl", "CARL"): (85.54, 0.682, 51.67, 0.539, 30.41, 0.516, 65.98, 0.645),
    ("pgdat-atro", "ATRO"): (73.42, 0.669, 36.04, 0.654, 21.37, 0.644, 41.52, 0.655),
    ("trades", "Con"): (86.07, 0.837, 57.62, 0.774, 37.55, 0.739, 67.88, 0.781),
    ("ccat-reference", "Con"): (92.44, 0.806, 51.68, 0.637, 45.12, 0.683, 67.07, 0.772),
    ("pgdat", "Con"): (86.52, 0.857, 57.30, 0.768, 34.77, 0.685, 69.10, 0.783),
    ("pgdat-snet", "SNet"): (84.19, 0.796, 56.41, 0.730, 35.25, 0.692, 67.49, 0.741),
    ("pgdat-ebd", "Energy"): (85.34, 0.832, 57.04, 0.763, 34.96, 0.690, 67.82, 0.774),
    ("trades-rr", "R-Con"): (86.47, 0.849, 58.52, 0.786, 38.06, 0.748, 68.97, 0.793),
    ("ccat-reference-rr", "R-Con"): (94.12, 0.909, 53.89, 0.662, 48.02, 0.688, 67.98, 0.785),
    ("pgdat-rr", "R-Con"): (86.91, 0.861, 58.21, 0.776, 35.32, 0.705, 70.24, 0.796),
}


def first_table(attacks: Sequence[str]) -> PaperFigures:
    """The paper's Table 1; `attacks` are demur's names of its four columns."""
    return {
        (entry, score, attack): Figure(*figures[2 * column : 2 * column + 2])
        for (entry, score), figures in _TABLE_1.items()
        for column, attack in enumerate(attacks)
    }
