"""Other schedulers, each in a virtual environment of its own, driven by one line of JSON a case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def environment(name: str, package: str, *more: str) -> Path:
    """The Python of a virtual environment with this package (``name==version``) and what else it
    needs to be imported, made once and kept in the build cache.

    :raises subprocess.CalledProcessError: pip could not install it; it says why.
    """
    cache = Path(os.environ.get("GPUSPAWNER_CACHE") or "/var/cache/gpuspawner")
    place = cache / "bench" / package.replace("==", "-")
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        print(f"Installing {package} for {name} …", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", package, *more], check=True)
        (place / "ready").touch()
    return python


def ask(python: Path, script: str, cases: Iterable[Any]) -> Iterator[Any]:
    """Give each case to a script of this folder that runs under ``python``; its answers."""
    with subprocess.Popen(
        [str(python), "-W", "ignore", str(HERE / script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for case in cases:
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                raise RuntimeError(f"{script} ended at {case}")
            yield json.loads(answer)
