"""Service images that lie, cheat or break, for tests of the host's side.

Each file beside this one is the program that process 1 of such an image runs: the real program
with one thing replaced.  They are never imported here; their imports exist in the guest.

``claims_wipe``      all results pass, but nothing was written to the GPU
``skips_wipe``       no results for overwrite and read_back; ``final`` says complete
``skips_final``      powers off instead of sending ``final``
``never_boots``      the kernel panics before ``hello``
``stays_silent``     boots and never says anything
``falls_silent``     hangs in the middle: after the first result nothing comes any more
``wrong_nonce``      every line has another nonce
``wrong_run``        every line has another run id: an old report played again
``truncated_lines``  every line is cut in the middle
``repeated_lines``   every line is sent twice
``lost_lines``       every third line is missing
``oversized_line``   the line after ``hello`` is 1 MiB long
``flood``            an endless stream of valid progress lines
``not_utf8``         the line after ``hello`` is no UTF-8
"""

from __future__ import annotations

from pathlib import Path

from images.progress import Progress
from service_vm.build import NAME, build

_HERE = Path(__file__).resolve().parent


def names() -> list[str]:
    """All variants."""
    return sorted(path.stem for path in _HERE.glob("*.py") if not path.stem.startswith("_"))


def build_variant(name: str, out: Path, cache: Path, image: str = NAME) -> Path:
    """Build the variant `name` into `out`/`image`; returns that directory.

    :param image: what the image is called; as ``service`` it takes the real one's place.
    """
    program = (_HERE / f"{name}.py").read_text()
    return build(out, cache, Progress.silent(), name=image, program=program)
