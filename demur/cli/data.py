"""demur data get."""

from pathlib import Path
from typing import Annotated

import typer

from demur.cli.app import DataFolder, app
from demur.errors import BadInput, suggestion

data_app = typer.Typer(
    name="data",
    help="Download a published data set.\n\nExample: demur data get cifar10",
    no_args_is_help=True,
)
app.add_typer(data_app, hidden=True)  # error messages and the guides name it

MB = 10**6


@data_app.command()
def get(
    name: Annotated[str, typer.Argument(help="cifar10 or cifar100.")], data: DataFolder = None
) -> None:
    """Download a data set from its authors, or check the files that are there.

    Example: demur data get cifar10 --data datasets
    """
    from demur.cli.progress import CountBar, on_message
    from demur.data import cifar
    from demur.files.atomic import exclusive_lock
    from demur.files.output_paths import check_output_folder

    if (published := cifar.PUBLISHED.get(name)) is None:
        known = suggestion(name, cifar.PUBLISHED)
        raise BadInput(f"no data set to download is called {name!r}; {known}")
    folders = cifar.search_folders(Path(data) if data else None)
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
