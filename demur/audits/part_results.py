"""Results of an attack ensemble on parts of the images, and their union."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from demur.attacks.autoattack import BROKEN_CLEAN, NOT_BROKEN, Chain
from demur.attacks.criteria import Rejected, RuleCriterion
from demur.audits.ensemble_result import CLEAN, EnsembleResult, Member
from demur.audits.flags import success_checks
from demur.audits.image_parts import Decisions
from demur.sanity import CheckResult
from demur.spec import show


class PartOptions(NamedTuple):
    """How to attack images that fit into memory."""

    bs: int
    state_path: str | Path | None = None
    first: int = 0  # the position of the first image among all
    sanity: bool = False
    skip_without_gradient: bool = False  # skip members that need a gradient which is missing


class PartResult(NamedTuple):
    """What was found on images that fit into memory."""

    x_adv: Tensor
    y: Tensor
    clean: Decisions
    attacked: Decisions
    broken_by: Tensor
    seconds: dict[int, float]  # by the position of the attack
    sanity: list[CheckResult]
    warnings: list[str]
    unconfirmed: int  # images that an attack broke and that the final pass does not confirm


class EnsembleOfParts(NamedTuple):
    """The attacks that ran on every part."""

    title: str  # of the ensemble
    chain: Chain
    names: Sequence[str]  # of its attacks
    blind: tuple[str, ...]  # the names of those that use no gradient of the model


def join_parts(
    parts: Sequence[PartResult], ensemble: EnsembleOfParts, mapped: Tensor | None, passes: int
) -> EnsembleResult:
    """Return the result of all parts.

    Args:
        parts: The results on the parts, in their order.
        ensemble: The attacks.
        mapped: Adversarial examples in a file; None if the parts hold them.
        passes: Forward passes that decided on each image.
    """
    chain = ensemble.chain
    names = [*ensemble.names, CLEAN, ""]  # a negative broken_by counts from the end
    assert (names[BROKEN_CLEAN], names[NOT_BROKEN]) == (CLEAN, "")
    (ball,) = chain.attacks[0].balls()
    broken_by = torch.cat([part.broken_by for part in parts])
    members = _members(parts, ensemble, broken_by)
    result = EnsembleResult(
        attack=f"{ensemble.title}, {show(ball)}",
        rejects=isinstance(chain.criterion, RuleCriterion),
        x_adv=torch.cat([part.x_adv for part in parts]) if mapped is None else mapped,
        y=torch.cat([part.y for part in parts]),
        labels=torch.cat([part.attacked.labels for part in parts]),
        accepted=torch.cat([part.attacked.accepted for part in parts]),
        clean_labels=torch.cat([part.clean.labels for part in parts]),
        clean_accepted=torch.cat([part.clean.accepted for part in parts]),
        broken_by=tuple(names[number] for number in broken_by.tolist()),
        seconds={member.name: member.seconds for member in members},
        sanity=tuple(parts[0].sanity),
        warnings=tuple(dict.fromkeys(one for part in parts for one in part.warnings)),
        members=members,
        unconfirmed=sum(part.unconfirmed for part in parts),
        seeks_errors=not isinstance(chain.criterion, Rejected),
        passes=passes,
        kinds=torch.cat([part.attacked.kinds for part in parts]),
        clean_kinds=torch.cat([part.clean.kinds for part in parts]),
    )
    more = success_checks(result) if result.sanity else ()
    return replace(result, sanity=(*result.sanity, *more))


def _members(
    parts: Sequence[PartResult], ensemble: EnsembleOfParts, broken_by: Tensor
) -> tuple[Member, ...]:
    """Return the attacks that ran, with what they did."""
    attacks = zip(ensemble.names, ensemble.chain.attacks, strict=True)
    return tuple(
        Member(
            name, show(attack), attack.gradient_queries > 0 and name not in ensemble.blind,
            attack.gradient_queries, attack.forward_queries,
            sum(part.seconds.get(position, 0.0) for part in parts),
            int(((broken_by >= position) | (broken_by == NOT_BROKEN)).sum()),
            int((broken_by == position).sum()),
        )
        for position, (name, attack) in enumerate(attacks)
        if any(position in part.seconds for part in parts)
    )  # fmt: skip
