"""Feature maps Phi, applied to the clients' data before a signature is taken: one a file."""
