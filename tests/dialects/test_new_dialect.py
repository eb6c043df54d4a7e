"""A dialect that nothing in the package knows: one object and its registration are all that the proxy needs."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import requests

from agentlightning.dialects import DIALECTS, PATHS, TranslatedDialect
from agentlightning.dialects.attributes import Attributes, Thing, write_message, write_request
from agentlightning.dialects.failures import Failure
from agentlightning.dialects.output import ModelOutput, StreamReader, StreamWriter, TextKind, TokenUsage
from agentlightning.llm_proxy import Budget
from agentlightning.utils.json_values import JsonMapping, JsonObject
from tests.llm_proxy.proxied import HERE, MODEL, Proxied, entry, proxied
from tests.stub_model.script import Answer, Script
from tests.stub_model.server import StubModel


class LineWriter(StreamWriter):
    """Writes one event a piece."""

    def start(self, output_id: str, model: str, created: float) -> None:
        self.send({"begins": output_id})

    def add_text(self, kind: TextKind, text: str, reasoning_field: str = "") -> None:
        self.send({"piece": text})

    def open_call(self, number: int, call_id: str, name: str) -> None:
        raise ValueError("tools are not known here")

    def add_arguments(self, number: int, arguments: str) -> None:
        raise ValueError("tools are not known here")

    def close(self, finish_reason: str, stop_text: str | None) -> None:
        self.send({"ends": finish_reason})

    def end(self, usage: TokenUsage) -> None:
        self.send({"written": usage.completion})


class LineDialect(TranslatedDialect):
    """One line in, one line out."""

    name = "line"
    path = "/line"
    span_name = "line.call"
    content_fields = frozenset({"line"})
    limit_fields = ("longest",)

    def request_attributes(self, body: JsonMapping) -> Attributes:
        attributes: Attributes = {}
        write_request(attributes, body, system="line")
        write_message(attributes, "gen_ai.prompt.0", role="user", content=body.get("line"))
        return attributes

    def response_attributes(self, response: Thing) -> Attributes:
        return {"gen_ai.completion.0.content": response["line"]}

    def to_chat(self, body: JsonMapping) -> JsonObject:
        chat = {"model": body["model"], "messages": [{"role": "user", "content": body["line"]}]}
        return {
            **chat,
            "stream": bool(body.get("stream")),
            **({"max_tokens": body["longest"]} if "longest" in body else {}),
        }

    def from_chat(self, body: JsonMapping) -> JsonObject:
        return {"model": body["model"], "line": body["messages"][-1]["content"]}

    def read_output(self, body: JsonMapping) -> ModelOutput:
        return ModelOutput("line-1", "m", body["line"], "stop", TokenUsage())

    def write_output(self, output: ModelOutput, request: JsonMapping) -> JsonObject:
        return {"line": output.text, "asked": request["line"]}

    def reader(self, writer: StreamWriter) -> StreamReader:
        raise NotImplementedError

    def writer(self, request: JsonMapping) -> LineWriter:
        return LineWriter(request)

    def error_body(self, failure: Failure) -> bytes:
        return orjson.dumps({"sorry": failure.message})


@pytest.fixture
def line(stub_model: StubModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxied]:
    """A proxy, where the dialect is registered, before a backend that speaks chat."""
    dialect = LineDialect()
    monkeypatch.setitem(DIALECTS, dialect.name, dialect)
    monkeypatch.setitem(PATHS, dialect.path, dialect)
    stub_model.script = Script([Answer("Yes.")])
    with proxied(entry(stub_model.url, "chat"), rollout_budget=Budget(calls=1)) as door:
        yield door


def ask(door: Proxied, **fields: Any) -> requests.Response:
    body = {"model": MODEL, "line": "Is it?", **fields}
    return requests.post(f"{door.endpoint}/v1/line", json=body, timeout=30)


def test_call_is_translated_and_recorded(line: Proxied, stub_model: StubModel) -> None:
    answered = ask(line, longest=7)

    assert answered.json() == {"line": "Yes.", "asked": "Is it?"}
    assert stub_model.requests[0].body["max_tokens"] == 7
    call = line.only_call()
    assert (call.get(f"{HERE}.dialect"), call.get(f"{HERE}.backend_dialect")) == ("line", "chat")


def test_stream_is_translated(line: Proxied) -> None:
    streamed = ask(line, stream=True).text

    pieces = [orjson.loads(part.partition("data: ")[2]) for part in streamed.split("\n\n") if part]
    assert "".join(piece.get("piece", "") for piece in pieces) == "Yes."
    assert pieces[-1]["written"] > 0


def test_error_has_its_shape(line: Proxied) -> None:
    ask(line)

    refused = ask(line)

    assert refused.status_code == 403
    assert "budget" in refused.json()["sorry"]
