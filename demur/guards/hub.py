"""Guards in the interface of huggingface_hub: its mixin where installed, local folders always."""

from pathlib import Path
from typing import Any

from torch import nn

from demur.errors import BadInput, shorten
from demur.guards.core import Guard


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
