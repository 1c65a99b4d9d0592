"""Training methods: a framework (how images are attacked and classified), a head and a schedule."""

from demur.methods.atro import ATRO
from demur.methods.batch_norm_mode import BatchNorm, attack_mode
from demur.methods.carl import CARL
from demur.methods.ccat import CCAT
from demur.methods.ebd import EBD
from demur.methods.frameworks import PGDAT, TRADES, Framework, Standard
from demur.methods.heads import Head, NoHead
from demur.methods.method import Method
from demur.methods.outputs import BatchOutputs, LabelledOutput
from demur.methods.rr import RR
from demur.methods.schedules import OneCycle, Piecewise, Schedule
from demur.methods.snet import SNet

FRAMEWORKS: tuple[type[Framework], ...] = (Standard, PGDAT, TRADES, CCAT)
HEADS: tuple[type[Head], ...] = (NoHead, RR, EBD, SNet, ATRO, CARL)
SCHEDULES: tuple[type[Schedule], ...] = (Piecewise, OneCycle)

__all__ = [
    "ATRO", "CARL", "CCAT", "EBD", "FRAMEWORKS", "HEADS", "PGDAT", "RR", "SCHEDULES", "TRADES",
    "BatchNorm", "BatchOutputs", "Framework", "Head", "LabelledOutput", "Method", "NoHead",
    "OneCycle", "Piecewise", "SNet", "Schedule", "Standard", "attack_mode",
]  # fmt: skip
