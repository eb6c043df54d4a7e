"""How answers ended reaches training through the proxy, whatever the client speaks and the backend answers."""

from typing import Any

import pytest

from agentlightning.adapter import TraceToTrajectory
from agentlightning.adapter.calls import finish_reason_of
from tests.llm_proxy.openai_suite import USER
from tests.llm_proxy.proxied import MODEL, Proxied, entry, proxied
from tests.stub_model.script import Script
from tests.stub_model.server import StubModel

CLIENTS = ["chat", "completions", "responses", "messages"]
TOKENS_OF_THE_ANSWER = 4
"""Three words and the end."""


def ask(door: Proxied, client: str, *, max_tokens: int, stream: bool) -> None:
    """Have the model answer in at most so many tokens, and read all of it."""
    if client == "messages":
        create: Any = door.anthropic().messages.create
        told = create(model=MODEL, messages=USER, max_tokens=max_tokens, stream=stream)
    elif client == "responses":
        create = door.openai().responses.create
        told = create(model=MODEL, input="Hello", max_output_tokens=max_tokens, stream=stream)
    elif client == "completions":
        create = door.openai().completions.create
        told = create(model=MODEL, prompt="Hello", max_tokens=max_tokens, stream=stream)
    else:
        create = door.openai().chat.completions.create
        told = create(model=MODEL, messages=USER, max_tokens=max_tokens, stream=stream)
    if stream:
        list(told)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("max_tokens", "reason"), [(2, "length"), (TOKENS_OF_THE_ANSWER, "stop")])
@pytest.mark.parametrize("client", CLIENTS)
def test_training_knows_which_answers_were_cut_off(
    stub_model: StubModel, client: str, max_tokens: int, reason: str, stream: bool
) -> None:
    stub_model.script = Script(["one two three"])
    backend = "completions" if client == "completions" else "chat"
    with proxied(entry(stub_model.url, backend)) as door:
        ask(door, client, max_tokens=max_tokens, stream=stream)
        (sequence,) = TraceToTrajectory().adapt(door.spans()).sequences

    (call,) = sequence.calls
    assert (call.end - call.start, call.finish_reason) == (max_tokens, reason)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("max_tokens", "reason"), [(2, "length"), (TOKENS_OF_THE_ANSWER, "stop")])
@pytest.mark.parametrize("backend", ["responses", "messages"])
def test_backends_with_words_of_their_own_are_understood(
    stub_model: StubModel, backend: str, max_tokens: int, reason: str, stream: bool
) -> None:
    stub_model.script = Script(["one two three"])
    with proxied(entry(stub_model.url, backend)) as door:
        ask(door, "chat", max_tokens=max_tokens, stream=stream)
        call = door.only_call()

    assert finish_reason_of(call.span.attributes) == reason


def test_an_answer_that_a_stop_text_ended_is_whole(stub_model: StubModel) -> None:
    stub_model.script = Script(["one two three"])
    with proxied(entry(stub_model.url, "chat")) as door:
        door.openai().chat.completions.create(model=MODEL, messages=USER, stop=[" three"])
        (sequence,) = TraceToTrajectory().adapt(door.spans()).sequences

    assert [(len(sequence.sampled_ids), call.finish_reason) for call in sequence.calls] == [(2, "stop")]
