"""Fixtures of this layer."""

from __future__ import annotations

from tests.service.hub_fixtures import allocator, guest_port, hub

__all__ = ["allocator", "guest_port", "hub"]
