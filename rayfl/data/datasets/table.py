"""Your own table: CSV or Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import override

from rayfl.data.base import Dataset, MoreSamples, Samples
from rayfl.data.own import TestBy, check_seed, draw_tests, split_numbering
from rayfl.data.tables import check_columns, check_file, line_of, read_table, require
from rayfl.data.tabular import Place, Roles, as_text, encode, features_of, known_values
from rayfl.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd


class Table(Dataset):
    """Table: a CSV or Parquet file with one row per sample: numbers, categories, and the target.

    Columns of numbers are features as they are. Columns of text are encoded one-hot: one feature per value,
    whole numbers sorted by size, others as text. Classes are numbered in the same order. Test samples are a
    second table, or a fraction of each class. Empty cells are refused. ``targets`` are columns of numbers to
    predict in place of a class (``loss=mse``; 0 and 1: ``loss=bce``).
    """

    elsewhere: ClassVar[str] = "data.path"

    name: Literal["table"] = "table"
    path: Path = Field(description="a .csv or .parquet file with a header")
    label: str | None = Field(None, min_length=1, description="the column with the class")
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="columns with numbers to predict, in place of a label"
    )
    test_path: Path | None = Field(None, description="a second table, of the test samples")
    test_fraction: float | None = Field(
        None, gt=0, lt=1, description="without a second table: fraction of each class for tests"
    )
    test_by: TestBy = None
    exclude: tuple[str, ...] = Field(
        (), description="columns that are not features; partition.name=column can divide by them"
    )
    categorical: tuple[str, ...] | None = Field(
        None, description="columns of numbers to encode one-hot; those with text always are"
    )
    seed: int = Field(0, description="seed of the draw of the test samples")

    @model_validator(mode="after")
    def _refuse_unused_seed(self) -> Table:
        check_seed(self)
        return self

    @override
    def available(self, root: Path) -> bool:
        for path in filter(None, (self.path, self.test_path)):
            check_file(path)
        predicted = self.targets if self.label is None else (self.label,)
        check_columns(self.path, (*predicted, *self.exclude, *(self.categorical or ())))
        return True

    @override
    def load(self, root: Path) -> Samples:
        import pandas as pd

        if (self.test_path is None) == (self.test_fraction is None):
            what = "either this or data.test_path defines the test samples"
            raise ConfigError("data.test_fraction", what, "give one of the two")
        if (self.label is None) == (not self.targets):
            what = "either this or data.targets names what to predict"
            raise ConfigError("data.label", what, "give one of the two")
        if len(set(self.targets)) < len(self.targets):
            raise ConfigError("data.targets", "names a column twice", "name each once")
        frame = read_table(self.path, ids=self.exclude)
        roles = Roles(self.label, self.exclude, self.categorical or (), self.targets)
        count, rows, tests_path = len(frame), frame.index.to_numpy(), self.path
        if self.test_path is not None:
            tests, tests_path = read_table(self.test_path, ids=self.exclude), self.test_path
            require(tests, tuple(frame.columns), str(self.test_path))
            rows = np.concatenate([rows, tests.index.to_numpy()])
            frame = pd.concat([frame, tests[frame.columns]], ignore_index=True)

        def at(row: int) -> str:
            return line_of(self.path if row < count else tests_path, int(rows[row]))

        table = encode(frame, roles, str(self.path), at)
        if self.test_fraction is None:
            test = np.arange(len(frame)) >= count
        else:
            test = draw_tests(self, table.y, table.columns, str(self.path))
        return Samples(
            self.path.stem,
            table.x[~test],
            table.y[~test],
            table.x[test],
            table.y[test],
            max(1, len(table.class_names)),
            class_names=table.class_names,
            columns=table.part(~test, test),
            numbering=None if self.test_fraction is None else split_numbering(test),
            targets_train=None if table.targets is None else table.targets[~test],
            targets_test=None if table.targets is None else table.targets[test],
        )

    @override
    def read_more(self, path: Path, own: Samples) -> MoreSamples:
        """Read another table with the same columns, in any order, and the run's categories and classes."""
        run_rows, roles = self._run_rows(), Roles(self.label, (), self.categorical or (), self.targets)
        new_table = read_table(path, ids=self.exclude)
        require(new_table, tuple(run_rows.columns), str(path))
        rows = new_table.index.to_numpy()

        def at(row: int) -> str:
            return line_of(path, int(rows[max(0, row)]))

        both = _with_new_rows(run_rows, new_table, roles, at)
        table = encode(both, roles, str(path), lambda row: at(row - len(run_rows)))
        texts = {str(name): as_text(new_table[name]) for name in new_table.columns if name not in run_rows}
        return MoreSamples(
            table.x[len(run_rows) :],
            table.y[len(run_rows) :],
            {name: text for name, text in texts.items() if text is not None},
            None if table.targets is None else table.targets[len(run_rows) :],
        )

    @override
    def inputs_of(self, frame: pd.DataFrame) -> NDArray[np.float32]:
        """The features of rows, with the run's categories; other columns are ignored."""
        roles = Roles(self.label, (), self.categorical or (), self.targets)
        run_rows = self._run_rows().drop(columns=list(roles.predicted))
        require(frame, tuple(run_rows.columns), "the table")

        def at(row: int) -> str:
            return f"the table: row {frame.index[max(0, row)]}"

        both = _with_new_rows(run_rows, frame, roles, at)
        x = features_of(both, roles, "the table", lambda row: at(row - len(run_rows)))
        return x[len(run_rows) :]

    def _run_rows(self) -> pd.DataFrame:
        """The rows of the run's tables, by which values are numbered, without the excluded columns."""
        import pandas as pd

        frames = [read_table(each) for each in (self.path, self.test_path) if each is not None]
        rows = pd.concat([each[frames[0].columns] for each in frames], ignore_index=True)
        return rows.drop(columns=[name for name in self.exclude if name in rows])


def _with_new_rows(run_rows: pd.DataFrame, new: pd.DataFrame, roles: Roles, place: Place) -> pd.DataFrame:
    """The run's rows, followed by the same columns of ``new``; ``place`` names a row of ``new``."""
    import pandas as pd

    new_rows = new[run_rows.columns].reset_index(drop=True)
    return pd.concat([run_rows, known_values(new_rows, run_rows, roles, place)], ignore_index=True)
