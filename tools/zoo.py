"""Put a trained run into the zoo: quantised weights, recipe, log, and no record.

    python tools/zoo.py RUN NAME        # writes zoo/NAME

Records belong to the weights that were attacked, so the quantised net is attacked anew:
demur attack zoo/NAME ...
"""

import sys
from pathlib import Path

import torch

from demur.files.atomic import quantise, read_json, write_json, write_tensors
from demur.runs import Run

ZOO = Path(__file__).parents[1] / "zoo"


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
