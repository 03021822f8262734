"""libvirtd for the tests with virtual machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import libvirtd as daemon


@pytest.fixture(scope="session")
def libvirtd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """libvirt answers; one of our own is started where none does."""
    state: Path = tmp_path_factory.mktemp("libvirtd")
    with daemon.libvirtd(state):
        yield
