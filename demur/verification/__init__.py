"""Verify stored results: whether the files of a run, a guard or a folder agree with each other."""

from demur.verification.folders import Finding, Verification, verify

__all__ = ["Finding", "Verification", "verify"]
