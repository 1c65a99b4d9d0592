"""The records of a run as one table: a line per image and record.

table = run.records().to_pandas()
table.groupby("attack")["correct"].mean()
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from demur.errors import BadInput
from demur.output import prediction, tcon
from demur.rejectors.rule import Rejector, Score
from demur.runs.record import Record
from demur.spec import show

if TYPE_CHECKING:
    import pandas
    import pyarrow

TRUE = "T-Con"  # name of the true confidence among the scores of a scores-only record
MISSING = "this needs {name}; install it with pip install 'demur[notebook]'"


class Records(list[Record]):
    """Records of a run, which also convert to tables.

    Args:
        records: The records.
        rejectors: Rejectors of the run by name, whose scores become columns.

    Example:
        >>> records = Run.open("digits-pgdat-rr").records("test")
        >>> table = records.to_pandas()
        >>> list(table.columns[:4])
        ['attack', 'record', 'split', 'index']
    """

    def __init__(
        self, records: Iterable[Record] = (), rejectors: Mapping[str, Rejector] | None = None
    ) -> None:
        super().__init__(records)
        self.rejectors = dict(rejectors or {})

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a table with one line per image and record.

        Columns: attack, record, split, index, y, predicted, correct, the norms of the perturbation,
        T-Con, and every score that is stored or needs no fitting. A value that a record lacks is
        missing.
        """
        try:
            import pandas
        except ImportError:
            raise BadInput(MISSING.format(name="pandas")) from None
        return pandas.DataFrame(self._columns())

    def to_arrow(self) -> "pyarrow.Table":
        """Return the table of `to_pandas` as a pyarrow table."""
        try:
            import pyarrow
        except ImportError:
            raise BadInput(MISSING.format(name="pyarrow")) from None
        arrays = {
            name: pyarrow.array(column, from_pandas=True)
            for name, column in self._columns().items()
        }
        return pyarrow.table(arrays)

    def _columns(self) -> dict[str, NDArray[Any]]:
        parts = [_columns_of(record, self.rejectors) for record in self]
        names = dict.fromkeys(name for part in parts for name in part)
        columns = {}
        for name in names:
            pieces = [
                part.get(name, np.full(len(record.y), np.nan))
                for record, part in zip(self, parts, strict=True)
            ]
            columns[name] = np.concatenate(pieces)
        return columns


def _columns_of(record: Record, rejectors: Mapping[str, Rejector]) -> dict[str, NDArray[Any]]:
    """Columns of one record, N each."""
    n = len(record.y)
    columns: dict[str, NDArray[Any]] = {
        "attack": np.full(n, record.label, dtype=object),
        "record": np.full(n, record.digest[:12], dtype=object),
        "split": np.full(n, str(record.metadata["split"]), dtype=object),
        "index": record.arrays["index"].numpy(),
        "y": record.y.numpy(),
    }
    if not record.scores_only:
        columns["predicted"] = prediction(record.output).numpy()
    columns["correct"] = record.correct
    for name in ("size_linf", "size_l2"):
        if name in record.arrays:
            columns[name] = record.arrays[name].numpy()
    stored = record.stored_scores
    for name, rejector in rejectors.items():
        if (text := show(rejector, full=True)) in stored:
            columns[name] = stored[text].double().numpy()
        elif isinstance(rejector, Score) and not record.scores_only:
            with torch.no_grad():
                columns[name] = rejector(record.output).double().numpy()
    if TRUE in stored:
        columns[TRUE] = stored[TRUE].double().numpy()
    elif not record.scores_only:
        columns[TRUE] = tcon(record.output, record.y).double().numpy()
    return columns
