"""Studies: methods x settings x seeds on the same clients, and the claims that they are to check."""
