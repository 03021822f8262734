"""``python -m tests.tiny``: build the tiny guest."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from images.base import BASE_STAGES
from images.cache import default_cache
from images.progress import Progress, sink_for
from tests.tiny.build import STAGES, build

parser = argparse.ArgumentParser(prog="python -m tests.tiny", description=__doc__)
parser.add_argument("--out", type=Path, required=True, help="directory of images")
parser.add_argument("--cache", type=Path, default=default_cache(), help="build cache")
options = parser.parse_args()
print(build(options.out, options.cache, Progress((*BASE_STAGES, *STAGES), sink_for("auto"))))
sys.exit(0)
