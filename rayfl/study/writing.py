"""The files of a study: its tables, claims, figures and page."""

from __future__ import annotations

import json
from pathlib import Path

from rayfl import files
from rayfl.rundir import clean
from rayfl.study import tables
from rayfl.study.figures import write_figures
from rayfl.study.outcome import Study
from rayfl.study.page import write_page


def write(study: Study) -> list[Path]:
    """Write all results into the study's folder; returns their paths.

    Of a study that was stopped only the tables and claims are written, since figures and page take seconds.
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
    contents = {
        "runs.csv": study.runs.to_csv(index=False),
        "table.csv": study.table.to_csv(index=False),
        "table.md": f"# {title}\n\n" + "\n".join(each.markdown() for each in shown),
        "table.tex": "\n".join(each.latex() for each in shown),
        "claims.json": json.dumps(clean({"verdict": study.verdict, "claims": study.claims}), indent=1) + "\n",
    }
    written = [folder / "study.yaml"]
    for name, text in contents.items():
        files.write(folder / name, text)
        written.append(folder / name)
    if study.stopped:
        return written
    return [*written, *write_figures(results, folder / "figures"), write_page(study)]
