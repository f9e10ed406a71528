"""The measures, one per file; to add one, add a file (see :mod:`rayfl.settings`)."""
