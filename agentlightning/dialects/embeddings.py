"""Embeddings: recorded so that a trace is whole; the vectors themselves are not kept."""

from agentlightning.dialects import attributes as fields
from agentlightning.dialects.attributes import Attributes, Dialect, Thing, as_json, field, items
from agentlightning.utils.json_values import JsonMapping


def request_attributes(body: JsonMapping) -> Attributes:
    attributes: Attributes = {}
    fields.write_request(attributes, body, system="openai")
    if body.get("input") is not None:
        attributes["embedding.input"] = as_json(body["input"])
    return attributes


def response_attributes(response: Thing) -> Attributes:
    attributes = fields.response_attributes(response)
    attributes["embedding.count"] = len(list(items(field(response, "data"))))
    return attributes


DIALECT = Dialect("embeddings", "/embeddings", "openai.embeddings", request_attributes, response_attributes)
