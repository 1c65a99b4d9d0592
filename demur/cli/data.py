"""demur data get and demur data check."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demur.cli.app import DataFolder, app
from demur.errors import BadInput, suggestion

if TYPE_CHECKING:
    from demur.data.cifar import Published

data_app = typer.Typer(
    name="data",
    help="Download a published data set, or check its files.\n\nExample: demur data get cifar10",
    no_args_is_help=True,
)
app.add_typer(data_app, hidden=True)  # error messages and the guides name it

MB = 10**6


@data_app.command()
def get(
    name: Annotated[str, typer.Argument(help="cifar10 or cifar100.")], data: DataFolder = None
) -> None:
    """Download a data set from its authors and check it.

    Example: demur data get cifar10 --data datasets
    """
    from demur.cli.progress import CountBar, on_message
    from demur.data import cifar
    from demur.files.atomic import exclusive_lock
    from demur.files.output_paths import check_output_folder

    published, folders = _published(name), cifar.search_folders(Path(data) if data else None)
    if not folders:
        raise BadInput("there is no home folder for data; name a folder with --data DIR")
    folder = folders[0]
    found, origin = cifar.find_complete(published, folder), "already there and complete"
    if found is None:
        check_output_folder(str(folder))
        with exclusive_lock(folder), CountBar(f"get {name}", "MB") as bar:
            found = cifar.download(
                published, folder, lambda done, total: bar.on_progress(done // MB, total // MB)
            )
        origin = f"fetched from {published.archive}"
    on_message(f"{published.title} is in {found}: {origin}")


@data_app.command()
def check(
    name: Annotated[
        str | None, typer.Argument(help="cifar10 or cifar100.", show_default="both")
    ] = None,
    data: DataFolder = None,
) -> None:
    """Compare the files of a data set with the published checksums.

    Example: demur data check cifar10 --data datasets
    """
    from demur.cli.progress import CountBar
    from demur.data import cifar

    given, checked, damages = Path(data) if data else None, 0, list[str]()
    folders = cifar.search_folders(given)
    for published in [_published(name)] if name else cifar.PUBLISHED.values():
        found = cifar.locate(published, given) if name else cifar.find(published, folders)
        if found is None:
            continue
        with CountBar(f"check {published.name}", "files") as bar:
            damaged = cifar.check_files(found, bar.on_progress)
        checked += 1
        if damaged:
            faults = ", ".join(f"{name} {fault}" for name, fault in damaged.items())
            again = f"demur data get {published.name}"
            again += f" --data {shlex.quote(data)}" if data else ""
            damages.append(
                f"{published.title} in {found.folder} is damaged: {faults}; "
                f"run '{again}' to download it again"
            )
        else:
            typer.echo(
                f"{published.title}: {published.images} images, {found.layout.form}, in "
                f"{found.folder}: every file has its published md5"
            )
    if not checked:
        raise cifar.not_found_error("no published data set is", "cifar10", given)
    if damages:
        raise BadInput("; ".join(damages))


def _published(name: str) -> "Published":
    from demur.data.cifar import PUBLISHED

    if name not in PUBLISHED:
        raise BadInput(f"no data set to download is called {name!r}; {suggestion(name, PUBLISHED)}")
    return PUBLISHED[name]
