"""Real VFIO passthrough on an emulated GPU host; by name only: ``tests/run lab``."""
