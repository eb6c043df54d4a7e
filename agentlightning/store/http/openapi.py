"""The OpenAPI description of the store's routes, derived from the same table that serves them."""

import inspect
from typing import Any, Literal

from pydantic import TypeAdapter

from agentlightning.store.http.routes import NOTICES_PATH, RestRoute, routes
from agentlightning.store.http.service import NoticesQuery

_SCHEMAS = "#/components/schemas/{model}"
_FAILURE = {
    "type": "object",
    "properties": {"detail": {"title": "What is wrong, and what to do"}, "error_type": {"type": "string"}},
    "required": ["detail", "error_type"],
}
_FAILURES = {
    "400": "The request makes no sense, or the store failed in a way nobody expected.",
    "401": "No token, or one that is wrong or has expired.",
    "403": "The token does not permit this, or a web page of another site sent it.",
    "404": "The id names nothing.",
    "408": "The body did not arrive in time.",
    "409": "The state does not allow this, or the id was used for another call.",
    "410": "The spans were dropped to save memory.",
    "413": "The request is too large.",
    "422": "Arguments that do not fit; `detail` lists them.",
    "503": "The store cannot be used now.",
}


def describe(document: dict[str, Any]) -> dict[str, Any]:
    """Add the store's routes to a document."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Failure"] = _FAILURE
    for route in routes():
        document["paths"].setdefault(route.path, {})[route.verb.lower()] = _operation(route, schemas)
    document["paths"]["/v1/traces"] = {"post": _traces()}
    document["paths"][NOTICES_PATH] = {"get": _notices()}
    return document


def _operation(route: RestRoute, schemas: dict[str, object]) -> dict[str, object]:
    op = route.codec.op
    required = [p.name for p in op.signature.parameters.values() if p.default is inspect.Parameter.empty]

    def parameter(name: str, place: str, schema: dict[str, object]) -> dict[str, object]:
        return {"name": name, "in": place, "required": place == "path" or name in required, "schema": schema}

    described: dict[str, object] = {
        "operationId": f"{route.verb.lower()}_{op.name}",
        "summary": op.name,
        "description": inspect.getdoc(op.declared) or "",
        "tags": ["store"],
        "parameters": [
            *(parameter(name, "path", {"type": "string"}) for name in route.path_names),
            *(parameter(name, "query", _schema(op.adapters[name], schemas)) for name in route.query_names),
        ],
        "responses": _responses(_result_schema(route, schemas), status=route.status),
    }
    if route.verb == "POST" and route.body is not None:
        described["requestBody"] = _json(_schema(op.adapters[route.body], schemas)) | {"required": True}
    elif route.verb == "POST":
        names = [name for name in op.hints if name not in route.path_names]
        needed = [name for name in names if name in required]
        arguments = {
            "type": "object",
            "properties": {name: _schema(op.adapters[name], schemas) for name in names},
            "required": needed,
            "additionalProperties": False,
        }
        described["requestBody"] = _json(arguments) | {"required": bool(needed)}
    return described


def _result_schema(route: RestRoute, schemas: dict[str, object]) -> dict[str, object]:
    if route.is_wrapped:
        return {"type": "object", "properties": {"sequence_id": {"type": "integer"}}, "required": ["sequence_id"]}
    return _schema(route.codec.op.result, schemas, mode="serialization")


def _schema(
    adapter: TypeAdapter[object],
    schemas: dict[str, object],
    mode: Literal["validation", "serialization"] = "validation",
) -> dict[str, object]:
    """The schema of one value; models it names are put with the others."""
    schema = adapter.json_schema(ref_template=_SCHEMAS, mode=mode)
    for name, definition in schema.pop("$defs", {}).items():
        schemas.setdefault(name, definition)
    return schema


def _json(schema: dict[str, object]) -> dict[str, object]:
    return {"content": {"application/json": {"schema": schema}}}


def _responses(schema: dict[str, object] | None, text: str = "The result.", status: int = 200) -> dict[str, Any]:
    """A success, and every failure there may be."""
    failure = _json({"$ref": _SCHEMAS.format(model="Failure")})
    success = {"description": text} | ({} if schema is None else _json(schema))
    return {str(status): success} | {code: {"description": meaning} | failure for code, meaning in _FAILURES.items()}


def _traces() -> dict[str, object]:
    return {
        "operationId": "export_traces",
        "summary": "OTLP/HTTP traces",
        "description": "Spans of any OpenTelemetry exporter, with agentlightning.rollout_id and "
        "agentlightning.attempt_id as resource or span attributes.",
        "tags": ["store"],
        "requestBody": {
            "required": True,
            "content": {
                "application/x-protobuf": {"schema": {"type": "string", "format": "binary"}},
                "application/json": {"schema": {"type": "object", "description": "An OTLP ExportTraceServiceRequest."}},
            },
        },
        "responses": _responses(None, "Taken; spans that were not are counted in the answer."),
    }


def _notices() -> dict[str, object]:
    fields = TypeAdapter(NoticesQuery).json_schema()["properties"]
    return {
        "operationId": "read_notices",
        "summary": "Changes behind a cursor",
        "description": "For clients without a WebSocket: waits up to `wait` seconds for changes behind `after`.",
        "tags": ["store"],
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in fields.items()
        ],
        "responses": _responses({"type": "object"}, "The new cursor and the notices before it."),
    }
