"""The HTML report of a run, and the comparison of several."""

from rayfl.report.compare import compare_table, differences, write_comparison
from rayfl.report.html import write_report

__all__ = ["compare_table", "differences", "write_comparison", "write_report"]
