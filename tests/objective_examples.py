"""One objective of each class, for tests that cover all of them."""

from typing import Any

from demur.attacks import CE, Objective
from demur.attacks.attack import RuleCriterion
from demur.spec import required_fields


def objective_example(cls: type[Objective], criterion: RuleCriterion) -> Objective:
    """An objective of the class whose required fields are filled in."""
    parts: dict[str, Any] = {
        "criterion": criterion, "rejector": criterion.rejector, "objective": CE(),
        "objectives": (CE(), CE()), "factor": -2.0,
    }  # fmt: skip
    return cls(**{name: parts[name] for name in required_fields(cls)})
