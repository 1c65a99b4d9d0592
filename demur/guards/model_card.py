"""The model card of a guard: what its folder's README.md says, as the Hub shows it."""

import re
from typing import Any

from demur.errors import visible
from demur.guards.decision import BaseGuard
from demur.spec.code_digest import code_of

MOST_CLASSES = 20  # that the card lists


def _plain(text: str) -> str:
    """A name that markdown shows as it is: no HTML, no link, no new line."""
    return re.sub(r"([\\`\[\]<>|])", r"\\\1", visible(" ".join(text.split())))


def _code(text: str) -> str:
    """A name as code, which a backtick would end."""
    return f"`{visible(' '.join(text.split())).replace('`', chr(39))}`"


def model_card(guard: BaseGuard, factory: str | None) -> str:
    """Return the model card as markdown with YAML front matter."""
    tags = ["image-classification", "selective-classification", "adversarial-robustness", "demur"]
    return "\n".join([
        "---", "library_name: demur", "pipeline_tag: image-classification", "tags:",
        *(f"- {tag}" for tag in tags), "---", "",
        "# Image classifier that rejects inputs", "",
        f"A classifier of {len(guard.class_names)} classes with a rejection rule, calibrated and "
        "saved by demur.", "",
        *_usage(guard, factory), "",
        *_inputs(guard), "",
        *_rule(guard), "",
        *_figures(guard), "",
        *_limits(guard), "",
    ])  # fmt: skip


def _usage(guard: BaseGuard, factory: str | None) -> list[str]:
    given = "" if guard.built_from is not None or factory else ", model=model"
    lines = ["## Use", "", "```python", "from demur import Guard", ""]
    lines += [f'guard = Guard.load("."{given})', 'result = guard(["image.png"])']
    lines += ["result.labels, result.accepted, result.reasons", "```"]
    code = [*([factory] if factory else ()), *code_of(*(one.rejector for one in guard.scores))]
    modules = _code(f"DEMUR_MODULES={','.join(dict.fromkeys(p.partition(':')[0] for p in code))}")
    own = f"This runs {' and '.join(map(_code, code))}: start Python where it finds that code, "
    return [*lines, "", f"{own}with {modules} in the environment."] if code else lines


def _inputs(guard: BaseGuard) -> list[str]:
    channels, height, width = guard.shape
    colours = {1: "grey", 3: "RGB"}.get(channels, f"{channels} channels")
    other = (
        "**resized** to this size (whole image, bilinear with antialiasing), and the reason of "
        "the decision says so"
        if guard.resize
        else "**an error**"
    )
    shown = [_code(name) for name in guard.class_names[:MOST_CLASSES]]
    more = len(guard.class_names) - len(shown)
    return [
        "## Images", "",
        f"- Size: {width} x {height} pixels, {colours}. Images of another size are {other}.",
        "- Values: 8 bits per channel, or floats in [0, 1]. Values out of range are "
        "an error.",
        f"- Classes: {', '.join(shown)}{f' and {more} more' if more else ''}.",
        f"- Class probabilities: softmax at temperature {guard.temperature:g}.",
        f"- This guard: {_plain(guard.name)}, version {guard.version}, digest `{guard.digest}`.",
    ]  # fmt: skip


def _rule(guard: BaseGuard) -> list[str]:
    lines = ["## Rule", "", "A prediction is accepted where every score reaches its threshold.", ""]
    lines += ["| score | threshold |", "|---|---:|"]
    rule = [(p.name, f"{p.threshold:.6g}" if p.rejects else "any") for p in guard.scores]
    lines += [f"| {_plain(name)} | {shown} |" for name, shown in rule]
    calibration = guard.calibration
    under = (calibration["certificate"] or {}).get("under")
    lines += ["", f"Chosen on {calibration['images']:,} {'attacked' if under else 'clean'} "
              f"calibration images: {_plain(guard.guarantee_text)}."]  # fmt: skip
    if calibration["certificate"] is None:
        shortfall = _plain(calibration["shortfall"] or "")
        lines.append(f"**The thresholds have no guarantee**: {shortfall}.")
    elif under:
        lines.append(
            "The guarantee holds for images from the distribution of the calibration images, each "
            "replaced by a wrong prediction that this attack finds and the rule accepts, if there "
            "is one. A stronger attack, or another radius, may break it."
        )
    else:
        lines.append(
            "The guarantee holds for clean images from the distribution of the calibration images. "
            "It says nothing about attacked images or about another distribution."
        )
    return lines


def _figures(guard: BaseGuard) -> list[str]:
    lines = [
        "## Figures", "",
        "Shares with exact 95% intervals. TPR is the accepted share of the correct predictions; "
        "risk is the share of errors among the accepted.", "",
        "| images | n | accuracy | coverage | TPR | risk |", "|---|---:|---:|---:|---:|---:|",
        _row("calibration, clean", guard.calibration),
    ]  # fmt: skip
    for found in guard.reported_rates:
        aim = f" ({found['aim']})" if found.get("aim") else ""  # older guards have none
        lines.append(_row(f"test, {found['attack']}{aim}", found))
    lines += ["", "The thresholds were chosen on the calibration images, so that row is not an "
              "independent test."]  # fmt: skip
    if chance := guard.calibration.get("chance_test"):  # older guards have none
        mark = "" if chance.get("passed") else "**"
        lines += ["", f"{mark}{_plain(str(chance.get('sentence')))}{mark}."]
    if not guard.reported_rates:
        lines.append("No figures on other images or under attack were measured.")
    return lines


def _row(name: str, figures: dict[str, Any]) -> str:
    cells = [_share(figures[key]) for key in ("accuracy", "coverage", "tpr", "risk")]
    return f"| {_plain(name)} | {figures['images']:,} | {' | '.join(cells)} |"


def _share(share: dict[str, Any] | None) -> str:
    if share is None:
        return "none"
    value, low, high = (100 * share[key] for key in ("value", "lo", "hi"))
    return f"{value:.1f}% ({low:.1f} to {high:.1f})"


def _limits(guard: BaseGuard) -> list[str]:
    attacked = any(figures["attack"] != "clean" for figures in guard.reported_rates)
    known = (
        "The rows above show the attacks that were tried; a stronger attack may do more damage."
        if attacked
        else "This guard was not attacked. Nothing is known about adversarial examples."
    )
    if any(figures.get("aim") for figures in guard.reported_rates):
        known += " Attacks aimed elsewhere say little: attack this rule with threshold=T."
    return ["## Limits", "", f"{known} A rejected image needs another decision: a person, or a "
            "second model."]  # fmt: skip
