"""Tables of the paper and of demur's own studies, each reproduced by one command."""

import os
from pathlib import Path

from demur.errors import BadInput
from demur.files.output_paths import check_output_file, check_output_folder, check_writable


def check_svg_file(name: str | None) -> str | None:
    """Return the path of an SVG file that can be written; raise BadInput if not."""
    if Path(name or "").suffix.lower() in (".png", ".pdf", ".jpg", ".jpeg"):
        raise BadInput(f"the figure is an SVG file; name it {Path(str(name)).stem}.svg")
    return check_output_file(name, "svg")


def check_archive_folder(name: str | None) -> str | None:
    """Return the path if folders can be made in it; it need not exist. Raise BadInput if not."""
    if check_output_folder(name) is not None:
        check_writable(Path(os.path.realpath(str(name))), str(name))
    return name
