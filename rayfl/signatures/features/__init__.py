"""Feature maps Phi, applied to clients' data before the signature is computed: one per file."""
