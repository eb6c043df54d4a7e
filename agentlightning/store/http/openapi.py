"""The OpenAPI description of the store's routes, derived from the same table that serves them."""

import inspect
from typing import Any

from pydantic import TypeAdapter

from agentlightning.store.http.codec import OperationCodec
from agentlightning.store.http.routes import NOTICES_PATH, RestRoute, routes
from agentlightning.store.http.service import NoticesQuery

__all__ = ["describe"]

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
    document["paths"][NOTICES_PATH] = {"get": _notices(schemas)}
    return document


def _operation(route: RestRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    op = route.codec.op
    described: dict[str, Any] = {
        "operationId": f"{'old_' if route.is_old else ''}{route.verb.lower()}_{op.name}",
        "summary": op.name,
        "description": inspect.getdoc(op.declared) or "",
        "tags": ["older paths" if route.is_old else "store"],
        "parameters": [*_in_path(route), *_in_query(route, schemas)],
        "responses": {str(route.status): _content("The result.", _result_schema(route, schemas))} | _failures(),
    }
    if route.verb == "POST":
        described["requestBody"] = _body(route, schemas)
    return described


def _in_path(route: RestRoute) -> list[dict[str, Any]]:
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.path_names]


def _in_query(route: RestRoute, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "query",
            "required": name in _required(route.codec),
            "schema": _schema(route.codec.op.adapters[name], schemas),
        }
        for name in route.query_names
    ]


def _body(route: RestRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in route.codec.op.hints if name not in (*route.path_names, *route.query_names)]
    if route.body is not None:
        return _content("", _schema(route.codec.op.adapters[route.body], schemas)) | {"required": True}
    required = [name for name in names if name in _required(route.codec)]
    shape = {
        "type": "object",
        "properties": {name: _schema(route.codec.op.adapters[name], schemas) for name in names},
        "required": required,
        "additionalProperties": False,
    }
    return _content("", shape) | {"required": bool(required)}


def _required(codec: OperationCodec) -> frozenset[str]:
    parameters = codec.op.signature.parameters.values()
    return frozenset(p.name for p in parameters if p.default is inspect.Parameter.empty)


def _result_schema(route: RestRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    if route.answer == "sequence_id":
        return {"type": "object", "properties": {"sequence_id": {"type": "integer"}}, "required": ["sequence_id"]}
    if route.answer == "items":
        return {"type": "array", "items": {}}
    return _schema(route.codec.op.result, schemas, mode="serialization")


def _schema(adapter: TypeAdapter[Any], schemas: dict[str, Any], mode: Any = "validation") -> dict[str, Any]:
    """The schema of one value; models it names are put with the others."""
    schema = adapter.json_schema(ref_template=_SCHEMAS, mode=mode)
    for name, definition in schema.pop("$defs", {}).items():
        schemas.setdefault(name, definition)
    return schema


def _failures() -> dict[str, Any]:
    failure = {"$ref": _SCHEMAS.format(model="Failure")}
    return {status: _content(meaning, failure) for status, meaning in _FAILURES.items()}


def _content(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"content": {"application/json": {"schema": schema}}}
    return content | ({"description": description} if description else {})


def _traces() -> dict[str, Any]:
    message = {"description": "An OTLP ExportTraceServiceRequest."}
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
                "application/json": {"schema": {"type": "object", **message}},
            },
        },
        "responses": {"200": {"description": "Taken; spans that were not are counted in the answer."}} | _failures(),
    }


def _notices(schemas: dict[str, Any]) -> dict[str, Any]:
    shape = TypeAdapter(NoticesQuery).json_schema()
    parameters = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in shape["properties"].items()
    ]
    return {
        "operationId": "read_notices",
        "summary": "Changes behind a cursor",
        "description": "For clients without a WebSocket: waits up to `wait` seconds for changes behind `after`.",
        "tags": ["store"],
        "parameters": parameters,
        "responses": {"200": _content("The new cursor and the notices before it.", {"type": "object"})} | _failures(),
    }
