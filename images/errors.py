"""Errors of the image builder: what happened, and what to do about it."""

from __future__ import annotations


class ImageError(Exception):
    """A build or an image is not usable.

    :param what: what happened, one sentence.
    :param hint: what the reader can do about it.
    """

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}\n  {hint}")
        self.what = what
        self.hint = hint
