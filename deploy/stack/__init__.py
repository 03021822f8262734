"""The parts of ``deploy/quickstart``; ``tests/run`` shares the tools.

``say``, ``needs``, ``tools``, ``options`` and ``process`` use the standard library alone: they
run before there is a virtual environment. ``state`` and ``run`` may import the project.
"""
