"""The files of a study: its tables, claims, figures and page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rayfl import files
from rayfl.rundir import clean
from rayfl.study import tables
from rayfl.study.figures import write_figures
from rayfl.study.outcome import Study
from rayfl.study.page import write_page


def write(study: Study) -> list[Path]:
    """Write all results into the study's folder; returns their paths.

    Of a study that was stopped only the tables and claims are written, since figures and page take seconds;
    those of an earlier state of the study stay. Files of a finished study's earlier states are removed.
    """
    results, folder = study.results, study.folder
    main = tables.main_table(results)
    others = [tables.comparison_table(results), tables.rank_table(results)]
    if results.study.tune is not None:
        others.append(tables.choice_table(study.tuned, results.study.tune))
    if study.judgements:
        others.append(tables.claim_table(study.judgements))
    shown = [main, *(each for each in others if each is not None)]
    title = results.study.title or results.study.name
    claims: dict[str, Any] = {"verdict": study.verdict, "claims": study.claims}
    if results.study.claims_left_out:
        claims["not_checked"] = results.study.claims_left_out
    contents = {
        "runs.csv": study.runs.to_csv(index=False),
        "table.csv": study.table.to_csv(index=False),
        "table.md": f"# {title}\n\n" + "\n".join(each.markdown() for each in shown),
        "table.tex": "\n".join(each.latex() for each in shown),
        "claims.json": json.dumps(clean(claims), indent=1) + "\n",
    }
    written = [folder / "study.yaml"]
    for name, text in contents.items():
        files.write(folder / name, text)
        written.append(folder / name)
    if results.study.tune is None:
        files.remove(folder / "tuned.json")  # of an earlier state of the study file
    if study.stopped:
        return written
    drawn = write_figures(results, folder / "figures")
    _remove_older(folder / "figures", [path.name for path in drawn])
    return [*written, *drawn, write_page(study)]


_DRAWN = ".drawn"
"""The file with the names of the figures that were drawn; others in their folder are the user's."""


def _remove_older(folder: Path, drawn: Sequence[str]) -> None:
    """Remove figures of an earlier state of the study, such as those of points that its grid no longer has.

    Raises:
        DiskError
    """
    names = folder / _DRAWN
    with suppress(OSError, UnicodeDecodeError):  # the first time, there is no such file
        for name in set(names.read_text(encoding="utf-8").splitlines()) - set(drawn):
            if Path(name).name == name:
                files.remove(folder / name)
    if folder.is_dir():
        files.write(names, "".join(f"{name}\n" for name in drawn))
