"""Audit of any image classifier, with or without a rejector, in one call.

report = demur.audit(model, x, y, rejector=Con(), eps=8 / 255)
report.save_html("audit.html")
"""

from demur.auditing.evaluate import AuditReport, audit

__all__ = ["AuditReport", "audit"]
