"""Embeddings: recorded so that a trace is whole; the vectors themselves are not kept."""

from collections.abc import Mapping
from typing import Any

from agentlightning.instrumentation.dialects import fields
from agentlightning.instrumentation.dialects.fields import Attributes, Dialect, field, items
from agentlightning.instrumentation.spans import as_json

__all__ = ["DIALECT"]


def request_attributes(body: Mapping[str, Any]) -> Attributes:
    attributes: Attributes = {}
    fields.write_request(attributes, body, system="openai")
    if body.get("input") is not None:
        attributes["embedding.input"] = as_json(body["input"])
    return attributes


def response_attributes(response: Any) -> Attributes:
    attributes: Attributes = {}
    fields.write_response(attributes, response)
    fields.write_usage(attributes, field(response, "usage"))
    attributes["embedding.count"] = len(list(items(field(response, "data"))))
    return attributes


DIALECT = Dialect("openai.embeddings", request_attributes, response_attributes)
