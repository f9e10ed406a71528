import pytest

pytest.register_assert_rewrite("tests.runs")  # what it asserts is explained as in tests
