"""Attack and audit any image classifier, with or without a rejector.

report = demur.audit(model, x, y, rejector=Con(), eps=8 / 255)
report.save_html("audit.html")
"""

from demur.audits.audit_report import AuditReport, audit
from demur.audits.ensemble_result import EnsembleResult
from demur.audits.ensembles import AutoAttack, RejectAutoAttack
from demur.audits.ray_cluster import cluster

__all__ = ["AuditReport", "AutoAttack", "EnsembleResult", "RejectAutoAttack", "audit", "cluster"]
