"""Make the digits entries of the leaderboard: train small nets, put them into the zoo, attack them.

    python tools/digits_board.py                 # what is there already is not made again
    python tools/digits_board.py --only pgdat-rr trades

Nets are trained in runs/float and stored in zoo/ with 8-bit weights. A copy of these in runs/ is
attacked, so that no record is written into zoo/. A free core needs about 20 minutes.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENTRIES = {  # head and framework of the recipe, rejectors
    "pgdat": ("Con", "Energy"),
    "pgdat-rr": ("R-Con", "Con"),
    "trades": ("Con",),
    "ccat": ("Con",),
    "ccat-rr": ("R-Con",),
    "pgdat-snet": ("SNet",),
    "pgdat-ebd": ("Energy",),
    "pgdat-carl": ("CARL",),
    "pgdat-atro": ("ATRO",),
}
CHANGES = ("net.width=8", "epochs=12")
IMAGES = 100


def demur(*words: str) -> None:
    """Run a command in the checkout; stop with its exit code where it fails."""
    done = subprocess.run([sys.executable, "-m", "demur", *words], check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)


def stored_net(recipe: str) -> Path:
    """Train the net of a recipe, put it into the zoo, and return the copy to attack."""
    name = f"digits-{recipe}-small"
    trained, kept, copy = (ROOT / part / name for part in ("runs/float", "zoo", "runs"))
    if not kept.exists():
        demur("train", f"digits-{recipe}", *CHANGES, "--out", str(trained), "--device", "cpu")
        words = [sys.executable, "tools/zoo.py", str(trained), name]
        subprocess.run(words, check=True, cwd=ROOT)
    if not copy.exists():
        shutil.copytree(kept, copy)
    return copy


def main() -> None:
    """Make the entries that the command line names, by default all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=ENTRIES, default=list(ENTRIES))
    for recipe in parser.parse_args().only:
        run = stored_net(recipe)
        for rejector in ENTRIES[recipe]:
            words = ("add", run.name, "--rejector", rejector, "--n", str(IMAGES), "--quick")
            demur("leaderboard", *words, "--device", "cpu")


if __name__ == "__main__":
    main()
