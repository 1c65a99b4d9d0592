"""The progress of a chain of attacks: a bar for each attack, and the resume state in one file.

The file holds digests of the attacks, the model and the images, the progress of each image, and at
its end a digest of all that. An image whose success the model does not confirm is attacked again.
"""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import NoReturn, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor, nn

from demur.attacks import AttackBatch
from demur.attacks.attack import RuleCriterion
from demur.attacks.attack_model import CheckedModel
from demur.attacks.autoattack import BROKEN_CLEAN, NOT_BROKEN, Chain, ChainState, MeanState
from demur.errors import BadInput
from demur.files.checked_files import tensor_digest, write_bytes
from demur.files.output_paths import check_output_file
from demur.progress import Bar, track
from demur.spec import digest

KEY_PREFIX = "of."  # of the names of the digests of attacks, model and images
PROGRESS = ("x_adv", "value", "broken_by", "tried")  # fields of ChainState that are stored
DIGEST_BYTES = 32
WRITE_SECONDS = 20.0  # least time between two writes
FINGERPRINT_IMAGES = 64  # number of images whose outputs identify a model
LINE_SECONDS = 30.0  # least time between two lines
BAR_SECONDS = 0.1  # least time between two updates of a bar


class EnsembleState:
    """State file of one evaluation: a chain of attacks on given images and a given model."""

    def __init__(
        self, path: str | Path | None, chain: Chain, model: CheckedModel, batch: AttackBatch
    ) -> None:
        self.path = None if path is None else Path(path)
        check_output_file(None if path is None else str(path))
        self.chain, self.model, self.batch = chain, model, batch
        self.written = monotonic()
        self.keys = {} if path is None else _keys(chain, model, batch)

    def save(self, chain_state: ChainState, at_once: bool = False) -> None:
        """Write the state if there is a file; at most every WRITE_SECONDS unless `at_once`."""
        if self.path is None or (monotonic() - self.written < WRITE_SECONDS and not at_once):
            return
        self.written = monotonic()
        parts = {name: getattr(chain_state, name).contiguous().cpu() for name in PROGRESS}
        content = bytes_of(self.keys | parts)
        write_bytes(self.path, content + hashlib.sha256(content).digest())

    def load(self, start: ChainState, bs: int) -> ChainState:
        """Return the state of the file, or `start` if there is no file.

        Successes are confirmed in batches of `bs`. Raises BadInput if the file is damaged or
        belongs to another evaluation; it stays as it is.
        """
        if self.path is None or not self.path.exists():
            return start
        stored = read_state(self.path)
        for name, key in self.keys.items():
            if name not in stored or not torch.equal(stored[name], key):
                raise BadInput(
                    f"{self.path} belongs to another evaluation, with other "
                    f"{name.removeprefix(KEY_PREFIX)}; name another file or remove it"
                )
        for name in PROGRESS:
            part, expected = stored.get(name), getattr(start, name)
            if part is None or (part.shape, part.dtype) != (expected.shape, expected.dtype):
                raise_damaged(self.path)
        x_adv, value, broken, tried = (stored[name].to(start.x_adv.device) for name in PROGRESS)
        state = replace(start, x_adv=x_adv, value=value, broken_by=broken, tried=tried)
        members = len(self.chain.attacks)
        valid = (broken >= BROKEN_CLEAN) & (broken < members) & (tried >= 0) & (tried <= members)
        if not bool((valid & self.chain.inside(self.batch.x, state.x_adv)).all()):
            raise_damaged(self.path)
        if isinstance(state, MeanState):  # one pass of a randomised model refutes nothing
            return state
        batches = zip(state.x_adv.split(bs), self.batch.y.split(bs), strict=True)
        success = torch.cat([self.chain.criterion(self.model(x_adv), y) for x_adv, y in batches])
        refuted = ((broken != NOT_BROKEN) & ~success).nonzero()[:, 0]
        for name in PROGRESS:
            getattr(state, name)[refuted] = getattr(start, name)[refuted]
        return state


def read_state(path: Path) -> dict[str, Tensor]:
    """Tensors of a state file, after its digest is checked."""
    content = path.read_bytes() if path.is_file() else b""  # not a folder, pipe or device
    tensors, own_digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if hashlib.sha256(tensors).digest() != own_digest:
        raise_damaged(path)
    try:
        return tensors_of(tensors)
    except (SafetensorError, KeyError, ValueError, RuntimeError):  # KeyError: an unknown type
        raise_damaged(path)


def raise_damaged(path: Path | None) -> NoReturn:
    """Raise BadInput: the file is not a state."""
    raise BadInput(
        f"{path} is not a state of an evaluation or is damaged; name another file or remove it"
    )


def concat_states(parts: list[ChainState]) -> ChainState:
    """States of several batches, concatenated."""
    inputs = zip(*(part.inputs for part in parts), strict=True)
    tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in PROGRESS}
    return replace(parts[0], **tensors, inputs=tuple(torch.cat(values) for values in inputs))


def _keys(chain: Chain, model: CheckedModel, batch: AttackBatch) -> dict[str, Tensor]:
    """Digests of everything that determines the result, by the names that the file uses."""
    out, again = (model(batch.x[:FINGERPRINT_IMAGES]) for _ in range(2))
    rules = chain.criterion.accept_rule.pairs if isinstance(chain.criterion, RuleCriterion) else ()
    # Functions without a state_dict differ in their values for the first images only.
    scores = [(f"{position}", score(out)) for position, (score, _) in enumerate(rules)]
    outputs = [("logits", out.logits), ("aux", out.aux)]
    if not all(map(torch.allclose, out, again)):  # random outputs identify no model
        outputs, scores = [], []
    outputs, scores = (
        [(name, part.double().round(decimals=4)) for name, part in named]
        for named in (outputs, scores)
    )
    module = model.model
    weights = module.state_dict() if isinstance(module, nn.Module) else {}
    digests = {  # outputs depend on the images, scores on the outputs
        "images": tensor_digest({"x": batch.x, "y": batch.y}),
        "weights or outputs of the model": tensor_digest(weights | dict(outputs)),
        "attacks": tensor_digest(dict(scores), digest(chain)),
    }
    return {
        KEY_PREFIX + name: torch.tensor([*found], dtype=torch.uint8)
        for name, found in digests.items()
    }


class MemberProgress:
    """Images that one attack has finished, and the time left, on standard output."""

    def __init__(self, name: str, total: int, verbose: bool) -> None:
        self.name, self.total, self.verbose, self.finished = name, total, verbose, 0
        self.started = self.written = monotonic()
        self._bar: Bar | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self.verbose and sys.stdout.isatty():
            self._bar = self._stack.enter_context(Bar(self.name, transient=True))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def batch(self, images: int) -> Iterator[None]:
        """Count the block as the attack on some images; steps of the attack count in part."""
        with track(lambda share: self._show(self.finished + share * images)):
            yield
        self.add(images)

    def add(self, images: int) -> None:
        """Count images that the attack has finished."""
        self.finished += images
        self._show(self.finished)

    def _show(self, done: float) -> None:
        """Show that `done` images are finished; a batch under way counts in part."""
        now, seconds = monotonic(), LINE_SECONDS if self._bar is None else BAR_SECONDS
        if not self.verbose or not 0 < done < self.total or now - self.written < seconds:
            return
        self.written = now
        if self._bar is not None:
            self._bar.update(done, self.total, f"{int(done)}/{self.total} images")
            return
        left = (now - self.started) / done * (self.total - done)
        sys.stdout.write(f"{self.name}: {int(done)} of {self.total} images, {left:.0f} s left\n")
        sys.stdout.flush()
