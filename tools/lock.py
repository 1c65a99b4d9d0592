"""Write requirements/*.lock: the versions and hashes that make and the Dockerfile install.

    .venv/bin/python tools/lock.py              # keep the locked versions where they still fit
    .venv/bin/python tools/lock.py --upgrade    # take the newest versions

uv resolves them for Python 3.11 and newer on every platform. Of the hashes, those of wheels for
CPython 3.11 to 3.14 on Linux, macOS and Windows (x86-64 and ARM) are kept, a third. The locks hold
all that is needed, so they are installed with `pip install --no-deps --require-hashes -r`. No
package is in two of them: `make demo` installs core and demo, the Dockerfile core and serve, `make
test` all four. torch is in `torch.lock`, with the CUDA libraries of the default build, and in
`torch-cpu.lock`, which is made anew where constraints.txt names another torch.
"""

import argparse
import re
import subprocess
import sys
import sysconfig
import tomllib
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
PYTHONS = ("cp311", "cp312", "cp313", "cp314")
WHEEL = re.compile(r"-([^-]+)-([^-]+)-([^-]+)\.whl$")
RARE = re.compile("i686|win32|ppc64|s390x|armv|riscv|loongarch|android|ios_|wasm|pyemscripten")
HEADER = """\
# Written by tools/lock.py for {what}.
# pip install --no-deps --only-binary :all: --require-hashes -r requirements/{name}.lock
"""


def uv_compile(*words: str, text: str | None = None) -> str:
    """Resolve requirements and return what uv prints."""
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    command = [uv if uv.exists() else "uv", "pip", "compile", *OPTIONS, *words]
    run = subprocess.run(command, cwd=ROOT, input=text, text=True, check=False, capture_output=True)
    if run.returncode:
        sys.exit(run.stderr)
    return run.stdout.strip()


def compiled(*words: str, text: str | None = None) -> list[str]:
    """Resolve requirements; return one text per package: name, version, marker and hashes."""
    return re.split("\n(?=[a-z])", uv_compile(*words, text=text))


def with_wheels(packages: list[str]) -> list[str]:
    """Return the packages with the hashes of their wheels for common platforms."""
    pins = "\n".join(one.splitlines()[0].removesuffix(" \\") for one in packages)
    found = tomllib.loads(uv_compile("--no-deps", "--format=pylock.toml", "-", text=pins))
    wheels = [wheel for package in found["packages"] for wheel in package.get("wheels", ())]
    kept = {wheel["hashes"]["sha256"] for wheel in wheels if is_common(wheel["url"])}
    return [_only(one, kept) for one in packages]


def is_common(url: str) -> bool:
    """Whether a wheel is for a Python and a platform of the locks."""
    found = WHEEL.search(url)
    assert found, url
    python, abi, platform = found.groups()
    fits = python.startswith("py") or python in PYTHONS or abi == "abi3"
    return fits and python != "py2" and not abi.endswith("t") and not RARE.search(platform)


def _only(package: str, kept: set[str]) -> str:
    first, *hashes = package.split(" \\\n")
    common = [one for one in hashes if one.rpartition(":")[2] in kept]
    if not common:
        sys.exit(f"{first} has no wheel for a common platform")
    return " \\\n".join([first, *common])


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
    packages = with_wheels(packages + compiled("--no-deps", "-", text=WITHOUT_DEPENDENCIES))
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
