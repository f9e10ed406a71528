"""The version of rayfl."""

__version__ = "0.2.0"
