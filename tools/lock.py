"""Write requirements/*.lock: the versions and hashes that make and the Dockerfile install.

    .venv/bin/python tools/lock.py              # keep the locked versions where they still fit
    .venv/bin/python tools/lock.py --upgrade    # take the newest versions

uv resolves each lock for Python 3.11 and newer on every platform. A lock holds all that is needed,
so it is installed with `pip install --no-deps --require-hashes -r`. `test` is resolved first, and
the other locks have its versions. torch is in `torch.lock`, with the CUDA libraries of the default
build, and in `torch-cpu.lock`, which is made anew where constraints.txt names another torch.
"""

import argparse
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = {"test": "dev", "demo": "report", "serve": "serve"}  # extras of pyproject
WITHOUT_DEPENDENCIES = {"test": ("torchattacks",)}  # it pins old versions
TORCH = re.compile("(torch|triton|cuda-.*|nvidia-.*)==")  # torch and what its CUDA build needs
OPTIONS = (
    "--universal", "--python-version=3.11", "--generate-hashes", "--no-header",
    "--no-annotate", "--constraint=constraints.txt",
)  # fmt: skip
HEADER = """\
# Written by tools/lock.py for {what}.
# pip install --no-deps --only-binary :all: --require-hashes -r requirements/{name}.lock
"""


def compiled(*words: str, text: str | None = None) -> list[str]:
    """Resolve requirements; return one text per package: name, version, marker and hashes."""
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    command = [uv if uv.exists() else "uv", "pip", "compile", *OPTIONS, *words]
    run = subprocess.run(command, cwd=ROOT, input=text, text=True, check=False, capture_output=True)
    if run.returncode:
        sys.exit(run.stderr)
    return re.split("\n(?=[a-z])", run.stdout.strip())


def write(name: str, packages: list[str], what: str) -> None:
    """Write one lock, in the order of the names."""
    text = HEADER.format(name=name, what=what) + "\n".join(sorted(packages)) + "\n"
    (ROOT / "requirements" / f"{name}.lock").write_text(text)


def main() -> None:
    """Write all locks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    if parser.parse_args().upgrade:
        (ROOT / "requirements" / "test.lock").unlink(missing_ok=True)
    for name, extra in LOCKS.items():
        # uv prefers the versions of the file that it writes
        option = f"--{'output-file' if name == 'test' else 'constraint'}=requirements/test.lock"
        packages = compiled("pyproject.toml", f"--extra={extra}", option)
        for other in WITHOUT_DEPENDENCIES.get(name, ()):
            packages += compiled("--no-deps", "-", text=other)
        write(name, [one for one in packages if not TORCH.match(one)], f"the extra {extra}")
        if name == "test":
            write("torch", [one for one in packages if TORCH.match(one)], "torch")
    torch = (ROOT / "constraints.txt").read_text().split()[-1] + "+cpu"
    lock = ROOT / "requirements" / "torch-cpu.lock"
    if torch not in lock.read_text().split():
        options = ("--no-deps", "--torch-backend=cpu", "-")
        write("torch-cpu", compiled(*options, text=torch), "the CPU builds of torch")


if __name__ == "__main__":
    main()
