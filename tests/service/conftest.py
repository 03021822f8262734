"""Fixtures of this layer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.hub_fixtures import allocator, guest_port, hub
from tests.service.page_site import pages
from tests.service.postgres import Cluster, cluster

__all__ = ["allocator", "guest_port", "hub", "pages"]


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """A PostgreSQL server for the session."""
    with cluster() as one:
        yield one


@pytest.fixture(params=["sqlite", "postgresql"])
def db_url(request: pytest.FixtureRequest) -> str | None:
    """Each engine in turn; ``None`` is the allocator's own SQLite file."""
    if request.param == "sqlite":
        return None
    one: Cluster = request.getfixturevalue("postgres")
    return one.database()
