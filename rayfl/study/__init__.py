"""Studies: methods x settings x seeds on the same clients, and the claims that they check.

- ``file``: the study file; ``claims``: claims, parsed and judged;
- ``preparation``: checks everything that can be checked before a run;
- ``plan``: the runs, each identified by the hash of its resolved config;
- ``running``: the runs, in this process or as trials of Ray Tune, each found again by its hash;
- ``tuning``: settings chosen on validation samples first;
- ``results``, ``tables``: the numbers; ``outcome``, ``figures``, ``page``, ``writing``: what users get;
- ``study``: all of it in order; ``estimate``, ``watching``, ``progress``: what users see before and during
  the runs.
"""

from rayfl.study.file import StudyFile, read, take
from rayfl.study.outcome import Study
from rayfl.study.preparation import Prepared, prepare
from rayfl.study.study import check_folder, check_parallel, check_places, execute, folder_of, run_study
from rayfl.study.watching import Stage, Watch

__all__ = [
    "Prepared",
    "Stage",
    "Study",
    "StudyFile",
    "Watch",
    "check_folder",
    "check_parallel",
    "check_places",
    "execute",
    "folder_of",
    "prepare",
    "read",
    "run_study",
    "take",
]
