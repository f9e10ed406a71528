"""Studies: methods x settings x seeds on the same clients, and the claims that they are to check.

- ``file``: what a study file may say;
- ``plan``: the runs that it means, each known by the hash of its resolved config;
- ``claims``: claims, read and judged;
- ``running``: the runs, in this process or as trials of Ray Tune, each found again by its hash;
- ``tuning``: settings chosen on validation samples first;
- ``results``, ``tables``, ``figures``: what they gave;
- ``study``: all of it in order.
"""

from rayfl.study.file import StudyFile, read, take
from rayfl.study.study import Prepared, Study, Watch, execute, folder_of, prepare, run_study

__all__ = [
    "Prepared",
    "Study",
    "StudyFile",
    "Watch",
    "execute",
    "folder_of",
    "prepare",
    "read",
    "run_study",
    "take",
]
