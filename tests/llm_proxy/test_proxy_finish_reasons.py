"""How answers ended reaches training through the proxy, in the words of every dialect."""

from typing import Any

import pytest

from agentlightning.adapter.call_attributes import finish_reason_of
from tests.llm_proxy.openai_suite import USER
from tests.llm_proxy.proxied import MODEL, Proxied, entry, proxied
from tests.stub_model.script import Script
from tests.stub_model.server import StubModel

TOKENS_OF_THE_ANSWER = 4
"""Three words and the end."""


def ask(door: Proxied, dialect: str, *, max_tokens: int, stream: bool) -> None:
    """Have the model answer in at most so many tokens, and read all of it."""
    asked: dict[str, tuple[Any, dict[str, Any]]] = {
        "chat": (door.openai().chat.completions, {"messages": USER, "max_tokens": max_tokens}),
        "completions": (door.openai().completions, {"prompt": "Hello", "max_tokens": max_tokens}),
        "responses": (door.openai().responses, {"input": "Hello", "max_output_tokens": max_tokens}),
        "messages": (door.anthropic().messages, {"messages": USER, "max_tokens": max_tokens}),
    }
    api, fields = asked[dialect]
    told = api.create(model=MODEL, stream=stream, **fields)
    if stream:
        list(told)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", ["chat", "completions", "responses", "messages"])
def test_training_knows_which_answers_were_cut_off(stub_model: StubModel, dialect: str, stream: bool) -> None:
    stub_model.script = Script(lambda _: "one two three")
    with proxied(entry(stub_model.url, dialect)) as door:
        for max_tokens in (2, TOKENS_OF_THE_ANSWER):
            ask(door, dialect, max_tokens=max_tokens, stream=stream)
        calls = door.calls()

    assert [finish_reason_of(call.span.attributes) for call in calls] == ["length", "stop"]
