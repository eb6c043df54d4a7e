"""Embeddings: recorded so that a trace is whole; the vectors themselves are not kept."""

from collections.abc import Mapping
from typing import Any

from agentlightning.dialects import attributes as fields
from agentlightning.dialects.attributes import Attributes, Dialect, as_json, field, items

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
