"""Methods of training: frames, heads and schedules."""

from demur.methods.frames import PGDAT, TRADES, BatchNorm, Frame, Standard, crafting
from demur.methods.heads import RR, Head, Plain
from demur.methods.method import Method
from demur.methods.schedules import OneCycle, Piecewise, Schedule

FRAMES: tuple[type[Frame], ...] = (Standard, PGDAT, TRADES)
HEADS: tuple[type[Head], ...] = (Plain, RR)
SCHEDULES: tuple[type[Schedule], ...] = (Piecewise, OneCycle)

__all__ = [
    "FRAMES", "HEADS", "PGDAT", "RR", "SCHEDULES", "TRADES", "BatchNorm", "Frame", "Head", "Method",
    "OneCycle", "Piecewise", "Plain", "Schedule", "Standard", "crafting",
]  # fmt: skip
