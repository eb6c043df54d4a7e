"""Models, tools and questions that the tests of LangChain and LangGraph share."""

from typing import Any

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.frameworks.contract import weather_in
from tests.instrumentation.traces import Trace
from tests.stub_model.server import StubModel

CALL = ["chat_model.llm", ["openai.chat.completion"]]
"""A model call, as it looks in the shape of a trace."""


def chat(stub_model: StubModel, **options: Any) -> ChatOpenAI:
    """A model that speaks to the stub; a connection that is kept would outlive the event loop of its test."""
    return ChatOpenAI(
        model="stub-model",
        base_url=stub_model.openai_url,
        api_key="any",
        max_retries=0,
        default_headers={"Connection": "close"},
        extra_body={"return_token_ids": True},
        **options,
    )


def ask_without_langchain(stub_model: StubModel, text: str) -> str:
    headers = {"Connection": "close"}
    with openai.OpenAI(base_url=stub_model.openai_url, api_key="any", default_headers=headers) as client:
        told = client.chat.completions.create(model="stub-model", messages=[{"role": "user", "content": text}])
    return str(told.choices[0].message.content)


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return weather_in(city)


def question(city: str = "Oslo") -> Any:
    """What an agent or a graph of messages is asked."""
    return {"messages": [("user", city)]}


def assert_ids_are_those_of(trace: Trace, stub_model: StubModel) -> None:
    """The triplets hold the token ids of the requests, in order; each turn continues the one before it."""
    triplets = trace.triplets()
    prompts = [tuple(triplet.prompt["token_ids"]) for triplet in triplets]
    assert prompts == [request.prompt_token_ids for request in stub_model.requests]
    assert all(triplet.response["token_ids"] for triplet in triplets)


def agents_of(trace: Trace) -> list[str]:
    """Whose each model call is, in order."""
    return [triplet.metadata["agent_name"] for triplet in trace.triplets()]
