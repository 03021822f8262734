"""The allocator's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

# The configuration file is Python: it plays the library that crashes.
CRASH = """
import os, resource, signal
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_crash_in_a_library_leaves_every_threads_stack(tmp_path: Path) -> None:
    config = tmp_path / "gpuspawner_config.py"
    config.write_text(CRASH)
    result = subprocess.run(
        [sys.executable, "-m", "gpuspawner.allocator"],
        env={**os.environ, "GPUSPAWNER_CONFIG": str(config)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert result.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in result.stderr
    assert "gpuspawner_config.py" in result.stderr
    assert "in initialize" in result.stderr
