"""Guards in the interface of huggingface_hub, and the model card that its pages show."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from demur.errors import BadInput, shorten
from demur.guards.core import Guard

if TYPE_CHECKING:
    from demur.guards.core import Guard

MOST_CLASSES = 20  # that the card lists


def save_pretrained(guard: Guard, folder: Path, repo_id: str | None, push_to_hub: bool) -> Path:
    """Write a guard to a folder and to the Hub; see `Guard.save_pretrained`."""
    if not push_to_hub:
        return guard.save(folder)
    held = _hub_class()()
    held.guard = guard
    held.save_pretrained(folder, repo_id=repo_id, push_to_hub=True)
    return folder


def from_pretrained(name: str, revision: str | None, model: nn.Module | None, device: str) -> Guard:
    """Read a guard from a folder or from the Hub; see `Guard.from_pretrained`."""
    if Path(name).is_dir():
        return Guard.load(name, model=model, device=device)
    made = _hub_class()
    try:
        held = made.from_pretrained(name, revision=revision, model=model, device=device)
    except BadInput:
        raise
    except (ValueError, OSError) as error:  # a wrong name, or no such repository or connection
        reason = shorten((str(error).splitlines() or [""])[0])
        raise BadInput(
            f"{shorten(name)!r} is no folder and cannot be read from the Hub: {reason}"
        ) from None
    guard: Guard = held.guard
    return guard


def _hub_class() -> Any:
    """A class with huggingface_hub's mixin that holds a guard."""
    try:
        from huggingface_hub import ModelHubMixin, snapshot_download
    except ImportError:
        raise BadInput(
            "the Hugging Face Hub needs its client; install it with pip install huggingface_hub, "
            "or name a folder that exists"
        ) from None

    class HubGuard(ModelHubMixin, library_name="demur", tags=["demur"]):
        guard: Guard

        def _save_pretrained(self, save_directory: Path) -> None:
            self.guard.save(save_directory)

        @classmethod
        def _from_pretrained(
            cls,
            *,
            model_id: str,
            revision: str | None,
            model: nn.Module | None = None,
            device: str = "cpu",
            **options: Any,
        ) -> "HubGuard":
            known = ("cache_dir", "force_download", "local_files_only", "token")
            asked = {key: options[key] for key in known if key in options}
            folder = snapshot_download(model_id, revision=revision, **asked)
            held = cls()
            held.guard = Guard.load(folder, model=model, device=device)
            return held

    return HubGuard


def model_card(guard: "Guard", factory: str | None) -> str:
    """Return the model card as markdown with YAML front matter."""
    return "\n".join([
        *_front_matter(), "",
        "# Image classifier that rejects inputs", "",
        f"A classifier of {len(guard.class_names)} classes with a rejection rule, calibrated and "
        "saved by demur.", "",
        *_usage(guard, factory), "",
        *_inputs(guard), "",
        *_rule(guard), "",
        *_figures(guard), "",
        *_limits(guard), "",
    ])  # fmt: skip


def _front_matter() -> list[str]:
    tags = ["image-classification", "selective-classification", "adversarial-robustness", "demur"]
    return [
        "---", "library_name: demur", "pipeline_tag: image-classification", "tags:",
        *(f"- {tag}" for tag in tags), "---",
    ]  # fmt: skip


def _usage(guard: "Guard", factory: str | None) -> list[str]:
    given = "" if guard.built_from is not None or factory else ", model=model"
    lines = ["## Use", "", "```python", "from demur import Guard", ""]
    lines += [f'guard = Guard.load("."{given})', 'result = guard(["image.png"])']
    lines += ["result.labels, result.accepted, result.reasons", "```"]
    if factory is not None:
        module = factory.partition(":")[0]
        lines += [
            "",
            f"The model is made by `{factory}`. Import that module first, or set "
            f"`DEMUR_MODULES={module}`.",
        ]
    return lines


def _inputs(guard: "Guard") -> list[str]:
    channels, height, width = guard.shape
    colours = {1: "grey", 3: "RGB"}.get(channels, f"{channels} channels")
    other = (
        "**resized** to this size (whole image, bilinear with antialiasing), and the reason of "
        "the decision says so"
        if guard.resize
        else "**an error**"
    )
    shown = [f"`{name}`" for name in guard.class_names[:MOST_CLASSES]]
    more = len(guard.class_names) - len(shown)
    return [
        "## Images", "",
        f"- Size: {width} x {height} pixels, {colours}. Images of another size are {other}.",
        "- Values: 8 bits per channel, or floats in [0, 1]. Values out of range are "
        "an error.",
        f"- Classes: {', '.join(shown)}{f' and {more} more' if more else ''}.",
        f"- Class probabilities: softmax at temperature {guard.temperature:g}.",
    ]  # fmt: skip


def _rule(guard: "Guard") -> list[str]:
    lines = ["## Rule", "", "A prediction is accepted where every score reaches its threshold.", ""]
    lines += ["| score | threshold |", "|---|---:|"]
    for part in guard.scores:
        shown = "any" if part.threshold == float("-inf") else f"{part.threshold:.6g}"
        lines.append(f"| {part.name} | {shown} |")
    calibration = guard.calibration
    lines += ["", f"Chosen on {calibration['images']:,} clean calibration images: "
              f"{calibration['sentence']}."]  # fmt: skip
    if calibration["certificate"] is None:
        lines.append(f"**The thresholds have no guarantee**: {calibration['shortfall']}.")
    else:
        lines.append(
            "The guarantee holds for clean images from the distribution of the calibration images. "
            "It says nothing about attacked images or about another distribution."
        )
    return lines


def _figures(guard: "Guard") -> list[str]:
    lines = [
        "## Figures", "",
        "Shares with exact 95% intervals. TPR is the accepted share of the correct predictions; "
        "risk is the share of errors among the accepted.", "",
        "| images | n | accuracy | coverage | TPR | risk |", "|---|---:|---:|---:|---:|---:|",
        _row("calibration, clean", guard.calibration),
    ]  # fmt: skip
    lines += [_row(f"test, {figures['attack']}", figures) for figures in guard.figures]
    lines += ["", "The thresholds were chosen on the calibration images, so that row is not an "
              "independent test."]  # fmt: skip
    if not guard.figures:
        lines.append("No figures on other images or under attack were measured.")
    return lines


def _row(name: str, figures: dict[str, Any]) -> str:
    cells = [_share(figures[key]) for key in ("accuracy", "coverage", "tpr", "risk")]
    return f"| {name} | {figures['images']:,} | {' | '.join(cells)} |"


def _share(share: dict[str, Any] | None) -> str:
    if share is None:
        return "none"
    value, low, high = (100 * share[key] for key in ("value", "lo", "hi"))
    return f"{value:.1f}% ({low:.1f} to {high:.1f})"


def _limits(guard: "Guard") -> list[str]:
    attacked = any(figures["attack"] != "clean" for figures in guard.figures)
    known = (
        "The rows above show the attacks that were tried; a stronger attack may do more damage."
        if attacked
        else "This guard was not attacked. Nothing is known about adversarial examples."
    )
    return ["## Limits", "", f"{known} A rejected image needs another decision: a person, or a "
            "second model."]  # fmt: skip
