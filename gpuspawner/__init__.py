"""Jupyter as a service on passed-through GPUs."""

__version__ = "0.1.0"
