"""The methods of a study at a point of its grid, as figures and pages show them side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rayfl.report.files import RunFiles
from rayfl.statistics import Interval
from rayfl.study.results import Results
from rayfl.study.running import directory_of, is_finished


@dataclass(frozen=True)
class MethodsAt:
    """The methods of a study at a point of the grid, as :class:`~rayfl.report.across.Methods`.

    Attributes:
        results: of the study.
        point: of its grid.
    """

    results: Results
    point: Mapping[str, str]
    _read: dict[str, list[RunFiles]] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> list[str]:
        """The labels of the methods."""
        return list(self.results.study.methods)

    @property
    def comparable(self) -> bool:
        """All methods have the same clients."""
        return True

    def runs(self, name: str) -> list[RunFiles]:
        """The finished runs of a method, read once."""
        if name not in self._read:
            runs = [run for run in self.results.runs if run.method == name and run.point == self.point]
            self._read[name] = [RunFiles.read(directory_of(run)) for run in runs if is_finished(run)]
        return self._read[name]

    def interval(self, name: str, column: str) -> Interval:
        """Mean and interval of a number over the seeds."""
        return self.results.interval(name, self.point, column)
