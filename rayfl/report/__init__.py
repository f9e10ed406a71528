"""Pages of runs, comparisons, partitions and clusterings, and figures."""

from rayfl.report.html import write_report

__all__ = ["write_report"]
