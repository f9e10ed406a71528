"""A study that has been run: its results from Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfl.errors import ConfigError, nearest
from rayfl.results import Result
from rayfl.study import tables
from rayfl.study.claims import Judgement, Verdict, overall
from rayfl.study.results import Results
from rayfl.study.running import directory_of, divergence_of, is_finished
from rayfl.units import counted

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import torch
    from numpy.typing import NDArray

    from rayfl.study.figures import StudyPlots


@dataclass(frozen=True)
class Study:
    """A study that has been run, as far as it got.

    Attributes:
        folder: with its tables, figures and page.
        results: of its runs.
        judgements: verdicts on its claims, one per point of the grid.
        tuned: the settings that were tried, with their scores.
        stopped: whether it was stopped before the last run.
    """

    folder: Path
    results: Results
    judgements: tuple[Judgement, ...]
    tuned: tuple[Mapping[str, Any], ...] = ()
    stopped: bool = False

    def __repr__(self) -> str:
        """Where it is, and how many runs it has; their configs would fill a screen."""
        return f"Study({str(self.folder)!r}, {counted(len(self.results.runs), 'run')})"

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row per run: method, point of the grid, seed, settings that differ, all numbers."""
        return self.results.frame()

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per method, point and column: mean and 95 % interval."""
        return tables.tidy(self.results)

    @property
    def plot(self) -> StudyPlots:
        """Figures: ``study.plot.accuracy()``."""
        from rayfl.study.figures import StudyPlots

        return StudyPlots(self.results)

    def result(self, method: str, seed: int | None = None, at: Mapping[str, Any] | None = None) -> Result:
        """One of its runs.

        Args:
            method: the label.
            seed: default: the first.
            at: the point of the grid, such as ``{"alpha": 0.1}``; on axes that are not named, the first.

        Raises:
            ConfigError: if the study has no such run, or it is not finished.
        """
        study, point = self.results.study, self.results.point(at or {})
        if method not in study.methods:
            raise ConfigError("method", f"no method {method!r}", nearest(method, study.methods))
        seed = study.seeds[0] if seed is None else seed
        for run in self.results.runs:
            if (run.method, run.seed, dict(run.point)) == (method, seed, point):
                if error := divergence_of(run):
                    raise ConfigError(run.title, f"did not finish: {error}")
                if not is_finished(run):
                    raise ConfigError(run.title, "is not finished", "the study's command resumes it")
                return Result(directory_of(run))
        raise ConfigError("seed", f"no run with seed {seed}", f"valid: {', '.join(map(str, study.seeds))}")

    def model(
        self,
        method: str,
        client: int | str | None = None,
        cluster: int | str | None = None,
        seed: int | None = None,
        at: Mapping[str, Any] | None = None,
    ) -> torch.nn.Module:
        """The model of a client or cluster in one of its runs, see :meth:`result`."""
        return self.result(method, seed, at).model(client, cluster)

    def predict(
        self,
        x: NDArray[np.generic] | pd.DataFrame,
        method: str,
        client: int | str | None = None,
        cluster: int | str | None = None,
        seed: int | None = None,
        at: Mapping[str, Any] | None = None,
    ) -> NDArray[np.generic]:
        """What a model of one of its runs predicts, see :meth:`rayfl.Result.predict` and :meth:`result`.

        Args:
            x: inputs as the dataset stores them ``(n, *shape)``, or a table like the run's.
            method, client, cluster, seed, at: whose model of which run.

        Returns:
            Classes ``(n,)``; for language models words ``(n, L)``; with numeric losses floats ``(n, K)``.
        """
        return self.result(method, seed, at).predict(x, client, cluster)

    @property
    def claims(self) -> list[dict[str, Any]]:
        """Every claim at every point of the grid: verdict, value, interval, and their unit."""
        with_units = [(judgement, tables.unit_of(judgement.statement)) for judgement in self.judgements]
        return [{**judgement.to_dict(), **({"unit": unit} if unit else {})} for judgement, unit in with_units]

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on all claims together: ``fails`` if one fails, ``holds`` if all hold; None if none was
        checked."""
        return overall(each.verdict for each in self.judgements) if self.judgements else None

    @property
    def failed(self) -> dict[str, str]:
        """Errors of failed runs, by title."""
        errors = self.results.errors
        return {run.title: errors[run.key] for run in self.results.runs if run.key in errors}

    def _repr_html_(self) -> str:
        """For notebooks: the table, and the claims."""
        import html

        import pandas as pd

        main = tables.main_table(self.results)
        shown = pd.DataFrame(list(main.rows), columns=list(main.header)).to_html(index=False)
        if self.judgements:
            claims = tables.claim_table(self.judgements)
            shown += pd.DataFrame(list(claims.rows), columns=list(claims.header)).to_html(index=False)
        return f"{shown}<p>{html.escape(main.caption)}</p>"
