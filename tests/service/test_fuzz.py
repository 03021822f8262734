"""The API against its own description: generated requests, valid and not, for each operation.

Answers must have a status that the description has, a body of the type that it gives, and never be
the allocator's failure (503, which is documented, says that it cannot now).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.service.harness import HEADERS, Site, acquire_body, lease_in

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
SETTINGS = settings(
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Running:
    """A site in a thread of its own, so that generated tests need no event loop."""

    def __init__(self, folder: Path) -> None:
        self.site = Site(folder)
        self.site.world()
        self.asked = 0
        self.known: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        try:
            async with self.site.running() as client:
                await self.site.add_host(client, 0)
                lease = await client.acquire(acquire_body())
                lease = await lease_in(client, lease.id, "running")
                (done, *_) = await client.diagnoses()
                self.known = {"host": "h1", "address": lease.gpus[0], "kind": "user"}
                self.ids = {"leases": lease.id, "diagnoses": done.id}
                self._ready.set()
                await self._stop.wait()
            await self.site.worlds["h1"].close()
        finally:
            self._ready.set()

    def __enter__(self) -> Running:
        self._thread.start()
        self._ready.wait(30)
        assert self.known, "the allocator did not start"
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def document(self) -> dict[str, Any]:
        """The description as it is served."""
        answer = requests.get(self.site.url + "api/v1/openapi.json", headers=HEADERS, timeout=10)
        found: dict[str, Any] = answer.json()
        return found

    def words(self, path: str) -> dict[str, str]:
        """Path parameters that there is something behind."""
        kind = path.split("/api/v1/")[1].split("/")[0]
        every = {**self.known, "id": self.ids.get(kind, ""), "name": "h1"}
        return {name: word for name, word in every.items() if "{" + name + "}" in path}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A site with one host and one running lease."""
    with Running(tmp_path) as one:
        yield one


def try_out(running: Running, operation: Any, examples: int, **strategy: Any) -> list[str]:
    """Generated requests for one operation; what is wrong with their answers."""
    wrong: list[str] = []

    @seed(20261130)
    @settings(SETTINGS, max_examples=examples)
    @given(case=operation.as_strategy(**strategy))
    def ask(case: Case) -> None:
        url = f"http://127.0.0.1:{running.site.port}"
        running.asked += 1
        answer = case.call(base_url=url, headers=HEADERS, timeout=20)
        try:
            assert answer.status_code < 500 or answer.status_code == 503
            case.validate_response(answer, checks=CHECKS)
        except (Exception, FailureGroup) as error:
            asked = f"{case.method} {case.formatted_path} {case.query} {case.body!r}"
            wrong.append(f"{asked[:300]}\n -> {answer.status_code} {answer.text[:300]}\n {error}")

    with contextlib.suppress(Unsatisfiable):  # without parameters there is no wrong request
        ask()
    return wrong


def test_the_api_is_as_it_says(running: Running) -> None:
    """Right and wrong requests for each operation, with any and with known path parameters."""
    schema = schemathesis.openapi.from_dict(running.document())
    wrong: list[str] = []
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        words = running.words(operation.path)
        stream = operation.path.endswith("/events")
        wrong += try_out(running, operation, 6)
        wrong += try_out(running, operation, 6, generation_mode=GenerationMode.NEGATIVE)
        if words and not stream:
            wrong += try_out(running, operation, 4, path_parameters=words)
    assert running.asked > 10 * len(operations)
    assert wrong == [], "\n\n".join(wrong[:5])
