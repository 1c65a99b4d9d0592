"""Training methods: a framework (how images are attacked and classified), a head and a schedule."""

from demur.methods.baseline_heads import ATRO, CARL, EBD, SNet
from demur.methods.frameworks import (
    CCAT,
    PGDAT,
    TRADES,
    BatchNorm,
    BatchOutputs,
    Framework,
    LabelledOutput,
    Standard,
    attack_mode,
)
from demur.methods.heads import RR, Head, NoHead
from demur.methods.method import (
    ADR,
    HardLabels,
    Labels,
    LabelSmoothing,
    Method,
    OneCycle,
    Piecewise,
    Schedule,
)

FRAMEWORKS: list[type[Framework]] = [Standard, PGDAT, TRADES, CCAT]
HEADS: list[type[Head]] = [NoHead, RR, EBD, SNet, ATRO, CARL]
LABELS: list[type[Labels]] = [HardLabels, LabelSmoothing, ADR]
SCHEDULES: list[type[Schedule]] = [Piecewise, OneCycle]

__all__ = [
    "ADR", "ATRO", "CARL", "CCAT", "EBD", "FRAMEWORKS", "HEADS", "LABELS", "PGDAT", "RR",
    "SCHEDULES", "TRADES", "BatchNorm", "BatchOutputs", "Framework", "HardLabels", "Head",
    "LabelSmoothing", "LabelledOutput", "Labels", "Method", "NoHead", "OneCycle", "Piecewise",
    "SNet", "Schedule", "Standard", "attack_mode",
]  # fmt: skip
