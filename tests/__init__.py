import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy and torch are there: as in the client actors
for name in ("COLUMNS", "LINES"):  # pytest-xdist's 80 x 24, which a console would keep that is made with them
    os.environ.pop(name, None)
pytest.register_assert_rewrite("tests.runs")  # what it asserts is explained as in tests
