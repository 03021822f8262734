"""The OpenAPI description, made from the routes and their types."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gpuspawner import __version__
from gpuspawner.allocator.routes import ACCESS_TEXT, Route
from gpuspawner.schema import Refusal

_REFUSALS = {
    400: "The request cannot be used as it is",
    401: "No valid token",
    403: "The caller may not do this, or a limit is reached",
    404: "There is no such thing, or it is not the caller's",
    409: "It cannot be done now",
    413: "The body is too large",
    415: "The body is not JSON",
    503: "No place in the pool, or the allocator's database or the hub does not answer",
}
_REF = "#/components/schemas/{model}"


def describe(routes: list[Route], prefix: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    models: set[type[BaseModel]] = {Refusal}
    for route in routes:
        models |= {model for model in (route.body, route.reply) if model is not None}
    ordered = sorted(models, key=lambda model: model.__name__)
    _refs, definitions = models_json_schema(
        [(model, "validation") for model in ordered], ref_template=_REF
    )
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(prefix + route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpuspawner allocator",
            "version": __version__,
            "description": "Leases of GPU virtual machines, and the pool they come from.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{route.method.lower()}_{route.path}").strip("_")
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": route.summary,
        "description": f"Access: {ACCESS_TEXT[route.access]}.",
        "security": [] if route.access == "public" else [{"token": []}],
        "parameters": [
            {"name": part, "in": "path", "required": True, "schema": {"type": "string"}}
            for part in re.findall(r"\{(\w+)\}", route.path)
        ]
        + [
            {"name": part, "in": "query", "description": text, "schema": {"type": "string"}}
            for part, text in route.query.items()
        ],
        "responses": {str(status): _response(route, status) for status in route.statuses}
        | {str(status): _json(_REFUSALS[status], Refusal) for status in route.refusals},
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, **_json("", route.body)}
        del operation["requestBody"]["description"]
    return operation


def _response(route: Route, status: int) -> dict[str, Any]:
    if route.stream:
        return {"description": "Server-sent events", "content": {"text/event-stream": {}}}
    if route.reply is None or status == 204:
        return {"description": "Done" if status == 204 else "OK"}
    return _json("OK", route.reply)


def _json(description: str, model: type[BaseModel]) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}},
    }
