"""libvirtd for the tests with virtual machines, and a place that QEMU's account may reach."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.daemon import Daemon, own_daemon


@pytest.fixture(scope="session")
def libvirtd() -> Iterator[Daemon]:
    """libvirt answers; one of our own is started where none does."""
    with own_daemon() as daemon:
        yield daemon


@pytest.fixture
def site_folder() -> Iterator[Path]:
    """A folder outside pytest's own, which pytest closes to other accounts at every start."""
    folder = Path(tempfile.mkdtemp(prefix="gs-site-", dir="/var/tmp"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
