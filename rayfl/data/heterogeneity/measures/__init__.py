"""The measures, one a file; to add one, add a file (see :mod:`rayfl.settings`)."""
