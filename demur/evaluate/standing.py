"""How far a chain of attacks has come, kept in one file so that a stopped one goes on."""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from torch import Tensor, nn

from demur.attacks.chain import Standing
from demur.attacks.victims import Victims
from demur.errors import BadInput
from demur.gradient import Model
from demur.runs.files import write_tensors

GIVEN = "given."


class State:
    """The file of one evaluation: of this chain on these images and this model."""

    def __init__(self, path: str | Path | None, chain: str, on: Victims) -> None:
        self.path, self.device = Path(path) if path else None, on.x.device
        self.key = _key(chain, on) if path else torch.empty(0)

    def keep(self, standing: Standing) -> None:
        """Write it down, if there is a file."""
        if self.path is None:
            return
        given = {f"{GIVEN}{place}": part for place, part in enumerate(standing.given)}
        named = {name: getattr(standing, name) for name in ("x_adv", "value", "broken_by", "tried")}
        write_tensors(self.path, {"key": self.key, **named, **given})

    def kept(self) -> Standing | None:
        """What an earlier call wrote; a file of another evaluation is refused."""
        if self.path is None or not self.path.exists():
            return None
        try:
            held = tensors_of(self.path.read_bytes())
        except SafetensorError:
            raise BadInput(f"{self.path} is no state of an evaluation; name another file") from None
        found = {name: part.to(self.device) for name, part in held.items()}
        if "key" not in found or not torch.equal(found["key"].cpu(), self.key):
            raise BadInput(
                f"{self.path} belongs to another model, other images or other attacks; name "
                "another file or remove it"
            )
        given = tuple(found[name] for name in sorted(found) if name.startswith(GIVEN))
        return Standing(found["x_adv"], found["value"], found["broken_by"], found["tried"], given)


def joined(parts: list[Standing]) -> Standing:
    """The standings of several batches as one."""
    given = zip(*(part.given for part in parts), strict=True)
    return Standing(
        torch.cat([part.x_adv for part in parts]),
        torch.cat([part.value for part in parts]),
        torch.cat([part.broken_by for part in parts]),
        torch.cat([part.tried for part in parts]),
        tuple(torch.cat(each) for each in given),
    )


def _key(chain: str, on: Victims) -> Tensor:
    """A digest of all that decides the outcome."""
    whole = hashlib.sha256(chain.encode())
    for tensor in (on.x, on.y, *_weights(on.model)):
        whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return torch.tensor(list(whole.digest()), dtype=torch.uint8)


def _weights(model: Model) -> list[Tensor]:
    return list(model.state_dict().values()) if isinstance(model, nn.Module) else []
