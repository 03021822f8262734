"""``python -m service_vm``: build the service image."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from images.base import BASE_STAGES
from images.cache import default_cache
from images.errors import ImageError
from images.progress import Progress, sink_for
from service_vm.build import STAGES, build


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m service_vm", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of images")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="build cache")
    parser.add_argument("--progress", choices=("auto", "plain", "bar", "json"), default="auto")
    options = parser.parse_args(argv)
    progress = Progress((*BASE_STAGES, *STAGES), sink_for(options.progress))
    try:
        print(build(options.out, options.cache, progress))
    except ImageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
