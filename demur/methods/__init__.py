"""Training methods: a framework (how images are attacked and classified), a head and labels."""

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
from demur.methods.method import ADR, HardLabels, Labels, LabelSmoothing, Method

FRAMEWORKS: list[type[Framework]] = [Standard, PGDAT, TRADES, CCAT]
HEADS: list[type[Head]] = [NoHead, RR, EBD, SNet, ATRO, CARL]
LABELS: list[type[Labels]] = [HardLabels, LabelSmoothing, ADR]

__all__ = [
    "ADR", "ATRO", "CARL", "CCAT", "EBD", "FRAMEWORKS", "HEADS", "LABELS", "PGDAT", "RR",
    "TRADES", "BatchNorm", "BatchOutputs", "Framework", "HardLabels", "Head",
    "LabelSmoothing", "LabelledOutput", "Labels", "Method", "NoHead", "SNet", "Standard",
    "attack_mode",
]  # fmt: skip
