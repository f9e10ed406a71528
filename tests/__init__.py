import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy and torch are there: as in the client actors
pytest.register_assert_rewrite("tests.runs")  # what it asserts is explained as in tests
