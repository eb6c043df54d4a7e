"""Keys of providers reach neither agents nor spans, whatever form a backend's failure has that repeats them."""

import openai
import orjson
import pytest

from tests.llm_proxy.openai_suite import USER
from tests.llm_proxy.proxied import MODEL, Proxied, entry, proxied
from tests.stub_model.raw import streamed, whole
from tests.stub_model.script import Handler
from tests.stub_model.server import serving

SECRET = "sk-provider-0123456789"
CREATED = b'event: response.created\ndata: {"type": "response.created", "response": {"id": "r", "output": []}}\n\n'
FAILED = {
    "type": "response.failed",
    "response": {"id": "r", "status": "failed", "error": {"code": "server_error", "message": f"no {SECRET}"}},
}
FAILED_EVENT = b"event: response.failed\ndata: " + orjson.dumps(FAILED) + b"\n\n"
SPLIT = FAILED_EVENT.index(SECRET.encode()) + 5


def recorded(door: Proxied) -> str:
    return " ".join(span.model_dump_json() for span in door.spans())


@pytest.mark.parametrize(
    "parts",
    [[CREATED, FAILED_EVENT], [CREATED + FAILED_EVENT], [CREATED, FAILED_EVENT[:SPLIT], FAILED_EVENT[SPLIT:]]],
    ids=["an event at a time", "all at once", "cut within the key"],
)
def test_stream_that_ends_with_its_own_failure(parts: list[bytes]) -> None:
    with serving(streamed(*parts)) as server, proxied(entry(server.url, "responses", api_key=SECRET)) as door:
        events = list(door.openai().responses.create(model=MODEL, input="hi", stream=True))

        assert [event.type for event in events] == ["response.created", "response.failed"]
        assert "no [redacted]" in events[-1].model_dump_json()
        assert SECRET not in recorded(door)
        assert door.only_call().error == "no [redacted]"


@pytest.mark.parametrize(
    "act", [whole(f"garbage {SECRET}".encode()), whole(f'"{SECRET}"'.encode())], ids=["no JSON", "no object"]
)
def test_answer_that_is_none(act: Handler) -> None:
    with serving(act) as server, proxied(entry(server.url, api_key=SECRET)) as door:
        with pytest.raises(openai.APIStatusError) as refused:
            door.openai().chat.completions.create(model=MODEL, messages=USER)

        assert SECRET not in str(refused.value)
        assert SECRET not in recorded(door)


def test_error_with_a_status_of_success() -> None:
    told = orjson.dumps({"error": {"message": f"wrong key {SECRET}"}})
    with serving(whole(told)) as server, proxied(entry(server.url, api_key=SECRET)) as door:
        answer = door.openai().chat.completions.with_raw_response.create(model=MODEL, messages=USER)

        assert answer.text == '{"error":{"message":"wrong key [redacted]"}}'
        assert SECRET not in recorded(door)
