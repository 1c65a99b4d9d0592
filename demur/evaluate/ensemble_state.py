"""The resume state of a chain of attacks, in one file."""

import hashlib
from pathlib import Path
from time import monotonic

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from torch import Tensor, nn

from demur.attacks import AttackBatch
from demur.attacks.chain import Chain, ChainState
from demur.attacks.criteria import RuleCriterion
from demur.errors import BadInput
from demur.gradient import Model
from demur.output import as_output
from demur.runs.files import write_tensors
from demur.spec import digest

INPUT_PREFIX = "given."  # of the names of ChainState.inputs in the file
WRITE_SECONDS = 20.0  # least time between two writes
FINGERPRINT_IMAGES = 64  # number of images whose outputs identify a model


class EnsembleState:
    """State file of one evaluation: a chain of attacks on given images and a given model."""

    def __init__(self, path: str | Path | None, chain: Chain, batch: AttackBatch) -> None:
        self.path, self.device = Path(path) if path else None, batch.x.device
        self.key = _key(chain, batch) if path else torch.empty(0)
        self.written = monotonic()

    def save(self, chain_state: ChainState, at_once: bool = False) -> None:
        """Write the state if there is a file; at most every WRITE_SECONDS unless `at_once`."""
        if self.path is None or (monotonic() - self.written < WRITE_SECONDS and not at_once):
            return
        self.written = monotonic()
        inputs = {f"{INPUT_PREFIX}{member}": part for member, part in enumerate(chain_state.inputs)}
        named = {
            name: getattr(chain_state, name) for name in ("x_adv", "value", "broken_by", "tried")
        }
        write_tensors(self.path, {"key": self.key, **named, **inputs})

    def load(self) -> ChainState | None:
        """Read the state; None if there is none, BadInput if it is of another evaluation."""
        if self.path is None or not self.path.exists():
            return None
        try:
            stored = tensors_of(self.path.read_bytes())
        except SafetensorError:
            raise BadInput(
                f"{self.path} is not a state of an evaluation; name another file"
            ) from None
        found = {name: part.to(self.device) for name, part in stored.items()}
        if "key" not in found or not torch.equal(found["key"].cpu(), self.key):
            raise BadInput(
                f"{self.path} belongs to another model, other images or other attacks; name "
                "another file or remove it"
            )
        inputs = tuple(found[name] for name in sorted(found) if name.startswith(INPUT_PREFIX))
        return ChainState(
            found["x_adv"], found["value"], found["broken_by"], found["tried"], inputs
        )


def concat_states(parts: list[ChainState]) -> ChainState:
    """States of several batches, concatenated."""
    inputs = zip(*(part.inputs for part in parts), strict=True)
    return ChainState(
        torch.cat([part.x_adv for part in parts]),
        torch.cat([part.value for part in parts]),
        torch.cat([part.broken_by for part in parts]),
        torch.cat([part.tried for part in parts]),
        tuple(torch.cat(values) for values in inputs),
    )


def _key(chain: Chain, batch: AttackBatch) -> Tensor:
    """Digest of everything that determines the result: chain, images, weights and outputs."""
    hasher = hashlib.sha256(digest(chain).encode())
    for tensor in (batch.x, batch.y, *_weights(batch.model), *_outputs(chain, batch)):
        hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return torch.tensor(list(hasher.digest()), dtype=torch.uint8)


def _weights(model: Model) -> list[Tensor]:
    return list(model.state_dict().values()) if isinstance(model, nn.Module) else []


def _outputs(chain: Chain, batch: AttackBatch) -> list[Tensor]:
    """Outputs and scores for the first images: functions without a state_dict differ in these."""
    with torch.no_grad():
        out = as_output(batch.model(batch.x[:FINGERPRINT_IMAGES]))
        pairs = (
            chain.criterion.accept_rule.pairs if isinstance(chain.criterion, RuleCriterion) else ()
        )
        outputs = (out.logits, out.aux, *(score(out) for score, _ in pairs))
    return [part.double().round(decimals=4) for part in outputs]
