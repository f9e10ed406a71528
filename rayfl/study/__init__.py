"""Studies: methods x settings x seeds on the same clients, and the claims that they are to check.

- ``claims``: claims, read and judged; ``file``: what a study file may say;
- ``plan``: the runs that it means, each known by the hash of its resolved config;
- ``running``: the runs, in this process or as trials of Ray Tune, each found again by its hash;
- ``results``, ``tables``: what they gave; ``tuning``: settings chosen on validation samples first;
- ``preparation``: everything that can be refused is refused here;
- ``outcome``, ``figures``, ``page``, ``writing``: what users get;
- ``study``: all of it in order; ``progress``, ``estimate``: what people see of it before and meanwhile.
"""

from rayfl.study.file import StudyFile, read, take
from rayfl.study.outcome import Study
from rayfl.study.preparation import Prepared, prepare
from rayfl.study.study import Watch, execute, folder_of, run_study

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
