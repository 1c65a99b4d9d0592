"""Execute the notebooks of docs/notebooks in place, with small pictures.

.venv/bin/python tools/notebooks.py

They take a minute together and need the notebook extra, nbclient and ipykernel.
"""

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
TIMEOUT = 300  # seconds of one cell


def execute(path: Path) -> nbformat.NotebookNode:
    """Return the executed notebook; raise CellExecutionError where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=TIMEOUT, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of this machine
    notebook.metadata.pop("language_info", None)
    return notebook


def main() -> None:
    """Execute every notebook and write it."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(execute(path), path)


if __name__ == "__main__":
    main()
