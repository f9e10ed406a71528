"""Embeddings of all signatures together, before they are compared; one per file."""
