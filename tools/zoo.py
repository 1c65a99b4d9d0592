"""Put a trained run into the zoo: quantised weights, recipe, log, and no record.

    python tools/zoo.py RUN NAME        # writes zoo/NAME

Records belong to the weights that were attacked, so the quantised net is attacked anew:
demur attack zoo/NAME ...
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from demur.files.checked_files import SCALE, read_json, write_json, write_tensors
from demur.runs import Run

LARGE = 50_000  # numbers of a tensor from which on it is stored with 8 bits
INT8_STEPS = 127
ZOO = Path(__file__).parents[1] / "zoo"


def quantise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors for `restore` of demur.files.checked_files; integers are left as they are."""
    small: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.ndim > 1 and tensor.numel() >= LARGE:
            scale = (
                tensor.float().flatten(1).abs().amax(1).clamp(min=torch.finfo().tiny) / INT8_STEPS
            )
            small[name] = (
                (tensor.float() / scale.view(-1, *[1] * (tensor.ndim - 1))).round().to(torch.int8)
            )
            small[name + SCALE] = scale
        else:
            small[name] = tensor.half() if tensor.is_floating_point() else tensor
    return small


def main(source: str, name: str) -> None:
    """Write zoo/NAME from a run."""
    run, target = Run(Path(source)), ZOO / name
    net = run.net(torch.device("cpu"))
    target.mkdir(parents=True)
    for file in ("recipe.txt", "metrics.jsonl"):
        (target / file).write_bytes((run.path / file).read_bytes())
    weights = write_tensors(target / "model.safetensors", quantise(net.state_dict()))
    metadata = read_json(run.path / "checkpoint.json", "train it again")
    write_json(
        target / "checkpoint.json",
        {"quantised_from": metadata["weights"]} | metadata | {"weights": weights},
    )
    size = (target / "model.safetensors").stat().st_size
    sys.stdout.write(f"{target}: {size:,} bytes\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
