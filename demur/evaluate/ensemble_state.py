"""How far a chain of attacks has come, kept in one file so that a stopped one goes on."""

import hashlib
from pathlib import Path
from time import monotonic

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from torch import Tensor, nn

from demur.attacks.batch import AttackBatch
from demur.attacks.chain import Chain, ChainState
from demur.attacks.criteria import RuleCriterion
from demur.errors import BadInput
from demur.gradient import Model
from demur.output import as_output
from demur.runs.files import write_tensors
from demur.spec import digest

GIVEN = "given."
APART = 20.0  # seconds between two writes
LOOKED_AT = 64  # images by whose answers a model is known


class EnsembleState:
    """The file of one evaluation: of this chain on these images and this model."""

    def __init__(self, path: str | Path | None, chain: Chain, batch: AttackBatch) -> None:
        self.path, self.device = Path(path) if path else None, batch.x.device
        self.key = _key(chain, batch) if path else torch.empty(0)
        self.written = monotonic()

    def keep(self, chain_state: ChainState, at_once: bool = False) -> None:
        """Write it down, if there is a file; not too often unless it has to be at once."""
        if self.path is None or (monotonic() - self.written < APART and not at_once):
            return
        self.written = monotonic()
        inputs = {f"{GIVEN}{member}": part for member, part in enumerate(chain_state.inputs)}
        named = {
            name: getattr(chain_state, name) for name in ("x_adv", "value", "broken_by", "tried")
        }
        write_tensors(self.path, {"key": self.key, **named, **inputs})

    def kept(self) -> ChainState | None:
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
        inputs = tuple(found[name] for name in sorted(found) if name.startswith(GIVEN))
        return ChainState(
            found["x_adv"], found["value"], found["broken_by"], found["tried"], inputs
        )


def concat_states(parts: list[ChainState]) -> ChainState:
    """The standings of several batches as one."""
    inputs = zip(*(part.inputs for part in parts), strict=True)
    return ChainState(
        torch.cat([part.x_adv for part in parts]),
        torch.cat([part.value for part in parts]),
        torch.cat([part.broken_by for part in parts]),
        torch.cat([part.tried for part in parts]),
        tuple(torch.cat(each) for each in inputs),
    )


def _key(chain: Chain, batch: AttackBatch) -> Tensor:
    """A digest of all that decides the outcome; a model is known by what it answers too."""
    whole = hashlib.sha256(digest(chain).encode())
    for tensor in (batch.x, batch.y, *_weights(batch.model), *_answers(chain, batch)):
        whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return torch.tensor(list(whole.digest()), dtype=torch.uint8)


def _weights(model: Model) -> list[Tensor]:
    return list(model.state_dict().values()) if isinstance(model, nn.Module) else []


def _answers(chain: Chain, batch: AttackBatch) -> list[Tensor]:
    """What the model and the scores of a rule say to the first images."""
    with torch.no_grad():
        out = as_output(batch.model(batch.x[:LOOKED_AT]))
        pairs = chain.criterion.rule.pairs if isinstance(chain.criterion, RuleCriterion) else ()
        told = (out.logits, out.aux, *(score(out) for score, _ in pairs))
    return [part.double().round(decimals=4) for part in told]
