"""Embeddings of all signatures together, before they are compared: one a file."""
