"""The program that runs inside the service VM.

It measures one GPU and reports over a virtio-serial port; it judges nothing.  Standard library of
Python 3.11 only, and no import from outside this package: the image carries nothing else.
"""

AGENT = "1.0"
"""Version of the program, sent in ``hello``."""
