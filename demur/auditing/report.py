"""The result of an audit: a table for the terminal, JSON values and one HTML page."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from demur.ensemble_result import (
    Counts,
    EnsembleResult,
    count_cell,
    entry,
    sanity_json,
    sanity_lines,
)
from demur.errors import BadInput
from demur.runs.files import write_text
from demur.sanity import CheckResult, Flag

NO_JINJA = "the page needs jinja2; install it with pip install 'demur[report]'"


@dataclass(frozen=True, eq=False)
class AuditReport:
    """What an audit found on N test images.

    Attributes:
        model: The name of the model.
        threat: The ball of the attacks, as text.
        rule: How images are accepted and where the threshold comes from; "" without a rejector.
        threshold: The threshold of the rejector; None without one.
        autoattack: AutoAttack on the classifier, whether or not the rejector accepts its errors.
        accepted_errors: RejectAutoAttack on classifier and rejector; None without a rejector.
        forced_rejections: The attack that makes the rejector reject; None without a rejector.
        sanity: Results of the sanity checks.
        warnings: Sentences about the model, the rejector and the attacks.

    Example:
        >>> import demur, torch
        >>> x, y = demur.Digits().load()["test"].batch(slice(0, 30))
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).eval()
        >>> report = demur.audit(net, x, y, eps=0.1, version="fast")
        >>> report.autoattack.attacked.n
        30
    """

    model: str
    threat: str
    rule: str
    threshold: float | None
    autoattack: EnsembleResult
    accepted_errors: EnsembleResult | None = None
    forced_rejections: EnsembleResult | None = None
    sanity: tuple[CheckResult, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def flags(self) -> list[Flag]:
        """Flags of the sanity checks: signs that the attacks were too weak."""
        return [flag for check in self.sanity for flag in check.flags]

    @property
    def verdict(self) -> str:
        """One sentence: whether the figures can be taken as the robustness of the model."""
        if not self.flags and not self.warnings:
            return "Nothing was flagged: the attacks did what they should on this model."
        return (
            f"{len(self.flags)} flags and {len(self.warnings)} warnings: the model may be less "
            "robust than the figures say, and each remedy should be tried."
        )

    def figures(self) -> Iterator[tuple[str, Counts, str]]:
        """Yield the figures of the report: a name, counts, and the kind of count that is meant."""
        yield "clean, correct", self.autoattack.clean, "accepted_right"
        yield "AutoAttack, correct", self.autoattack.attacked, "accepted_right"
        if self.accepted_errors is not None and self.forced_rejections is not None:
            yield "clean, accepted", _accepted(self.accepted_errors.clean), "accepted_right"
            yield "clean, accepted errors", self.accepted_errors.clean, "accepted_wrong"
            yield "attacked, accepted errors", self.accepted_errors.attacked, "accepted_wrong"
            yield "attacked, forced rejections", self.forced_rejections.attacked, "rejected"

    def to_json(self) -> dict[str, Any]:
        """Return everything except the images as JSON values."""
        parts = {
            "autoattack": self.autoattack,
            "accepted_errors": self.accepted_errors,
            "forced_rejections": self.forced_rejections,
        }
        return {
            "model": self.model,
            "threat": self.threat,
            "n": len(self.autoattack.y),
            "rule": self.rule,
            "threshold": self.threshold,
            "verdict": self.verdict,
            **{name: part and part.to_json() for name, part in parts.items()},
            "sanity": sanity_json(self.sanity),
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        lines = [f"Audit of {self.model}: {self.threat}, {len(self.autoattack.y)} test images"]
        lines += [f"{name:<28}{count_cell(counts, kind)}" for name, counts, kind in self.figures()]
        if self.rule:
            lines += entry("rejector", self.rule)
        lines += sanity_lines(self.sanity)
        for sentence in self.warnings:
            lines += entry("warning", sentence)
        return "\n".join([*lines, *entry("verdict", self.verdict)])

    def save_html(self, path: str | Path) -> None:
        """Write the report as one HTML page that needs no other file.

        Raises:
            BadInput: jinja2 is not installed.
        """
        try:
            from jinja2 import Environment, StrictUndefined
        except ImportError:
            raise BadInput(NO_JINJA) from None
        text = files("demur.auditing").joinpath("audit.html.j2").read_text(encoding="utf-8")
        environment = Environment(autoescape=True, undefined=StrictUndefined)
        parts = (self.autoattack, self.accepted_errors, self.forced_rejections)
        page = environment.from_string(text).render(
            report=self,
            figures=[
                (name, count_cell(counts, kind), 100 * counts.share(kind))
                for name, counts, kind in self.figures()
            ],
            details=[str(part) for part in parts if part is not None],
        )
        write_text(Path(path), page)


def _accepted(counts: Counts) -> Counts:
    """Return counts whose first entry is all accepted images."""
    return Counts(counts.accepted_right + counts.accepted_wrong, 0, counts.rejected)
