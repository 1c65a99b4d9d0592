"""Write requirements/*.lock: the versions and hashes that make and the Dockerfile install.

    .venv/bin/python tools/lock.py              # keep the locked versions where they still fit
    .venv/bin/python tools/lock.py --upgrade    # take the newest versions

uv resolves them for Python 3.11 and newer on every platform. They hold all that is needed, so they
are installed with `pip install --no-deps --require-hashes -r`. No package is in two of them: `make
demo` installs core and demo, the Dockerfile core and serve, `make test` all four. torch is in
`torch.lock`, with the CUDA libraries of the default build, and in `torch-cpu.lock`, which is made
anew where constraints.txt names another torch.
"""

import argparse
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
EXTRAS = {"demo": "report", "serve": "serve"}  # of pyproject.toml
WITHOUT_DEPENDENCIES = "torchattacks"  # it pins old versions
WHAT = {
    "core": "every target", "demo": "make demo, after core", "serve": "the Dockerfile, after core",
    "test": "make test, after core, demo and serve",
}  # fmt: skip
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


def key(package: str) -> str:
    """Return the name of a package."""
    return package.split("==", maxsplit=1)[0]


def write(name: str, packages: list[str], what: str) -> None:
    """Write one lock, in the order of the names."""
    text = HEADER.format(name=name, what=what) + "\n".join(sorted(packages)) + "\n"
    (FOLDER / f"{name}.lock").write_text(text)


def main() -> None:
    """Write all locks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    upgrade = parser.parse_args().upgrade
    earlier = [(FOLDER / f"{name}.lock").read_text() for name in WHAT if not upgrade]
    (FOLDER / "test.lock").write_text("".join(earlier))  # uv keeps the versions of its output
    packages = compiled("pyproject.toml", "--extra=dev", "--output-file=requirements/test.lock")
    packages += compiled("--no-deps", "-", text=WITHOUT_DEPENDENCIES)
    write("torch", [one for one in packages if TORCH.match(one)], "torch")
    of = {"test": {one for one in packages if not TORCH.match(one)}}
    for name, extra in EXTRAS.items():
        option = "--constraint=requirements/test.lock"
        needed = {key(one) for one in compiled("pyproject.toml", f"--extra={extra}", option)}
        of[name] = {one for one in of["test"] if key(one) in needed}
    of["core"] = of["demo"] & of["serve"]
    for name, others in (("core", ()), ("demo", ("core",)), ("serve", ("core",))):
        write(name, [*of[name].difference(*(of[one] for one in others))], WHAT[name])
    write("test", [*of["test"].difference(of["demo"], of["serve"])], WHAT["test"])
    torch = (ROOT / "constraints.txt").read_text().split()[-1] + "+cpu"
    lock = FOLDER / "torch-cpu.lock"
    if torch not in lock.read_text().split():
        options = ("--no-deps", "--torch-backend=cpu", "-")
        write("torch-cpu", compiled(*options, text=torch), "the CPU builds of torch")


if __name__ == "__main__":
    main()
