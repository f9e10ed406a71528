"""Modules of PyTorch that networks are made of. Configs need no PyTorch: import these inside of methods."""
