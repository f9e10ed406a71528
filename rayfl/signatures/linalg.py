"""Leading eigenpairs: see :mod:`rayfl.linalg`."""

from rayfl.linalg import fix_signs, leading_eigenpairs, one_thread

__all__ = ["fix_signs", "leading_eigenpairs", "one_thread"]
