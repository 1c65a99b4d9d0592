"""Methods of training: frames, heads and schedules."""

from demur.methods.atro import ATRO
from demur.methods.carl import CARL
from demur.methods.ccat import CCAT
from demur.methods.crafting import BatchNorm, crafting
from demur.methods.ebd import EBD
from demur.methods.frames import PGDAT, TRADES, Frame, Standard
from demur.methods.heads import Head, Plain
from demur.methods.method import Method
from demur.methods.rr import RR
from demur.methods.schedules import OneCycle, Piecewise, Schedule
from demur.methods.snet import SNet
from demur.methods.views import Seen, Views

FRAMES: tuple[type[Frame], ...] = (Standard, PGDAT, TRADES, CCAT)
HEADS: tuple[type[Head], ...] = (Plain, RR, EBD, SNet, ATRO, CARL)
SCHEDULES: tuple[type[Schedule], ...] = (Piecewise, OneCycle)

__all__ = [
    "ATRO", "CARL", "CCAT", "EBD", "FRAMES", "HEADS", "PGDAT", "RR", "SCHEDULES", "TRADES",
    "BatchNorm", "Frame", "Head", "Method", "OneCycle", "Piecewise", "Plain", "SNet", "Schedule",
    "Seen", "Standard", "Views", "crafting",
]  # fmt: skip
