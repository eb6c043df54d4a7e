"""What the tests of the accounts share: a proxy before a stub model, a rollout, calls, and what the store has."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests

from agentlightning.dialects import CHAT
from agentlightning.llm_proxy import LLMProxy, ModelConfig
from agentlightning.llm_proxy.recorder import CallRecord, Origin
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.types import LLM, AttemptedRollout, Span
from tests.stub_model.server import StubModel

CALL, RAW = "litellm_request", "raw_gen_ai_request"
MODEL = "stub-model"
HERE = "agentlightning.proxy"


def entry(model: StubModel, /, name: str = MODEL, **params: Any) -> ModelConfig:
    """The entry of a model list for a stub model."""
    info = params.pop("model_info", {})
    served = {"model": f"hosted_vllm/{model.models[0]}", "api_base": model.openai_url, **params}
    return {"model_name": name, "litellm_params": served, "model_info": info}


@contextmanager
def serving(model: StubModel, store: LightningStore | None = None, **options: Any) -> Iterator[LLMProxy]:
    """A proxy that runs before a stub model."""
    options.setdefault("model_list", [entry(model)])
    proxy = LLMProxy(store=store if store is not None else InMemoryLightningStore(), **options)
    proxy.start()
    try:
        yield proxy
    finally:
        if proxy.is_running():  # in a thread, where the stop does not go on in the background
            stopping = threading.Thread(target=proxy.stop)
            stopping.start()
            stopping.join()


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


INPUTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat("Hi"),
    "/v1/completions": {"model": MODEL, "prompt": "Hi"},
    "/v1/responses": {"model": MODEL, "input": "Hi"},
    "/v1/embeddings": {"model": MODEL, "input": "Hi"},
    "/v1/messages": {**chat("Hi"), "max_tokens": 10},
}
"""A request in each dialect, by path."""


def ask(url: str, text: str = "Hi", /, *, headers: dict[str, str] | None = None, **fields: Any) -> requests.Response:
    """One chat completion, at an endpoint without `/v1`."""
    return requests.post(f"{url}/v1/chat/completions", json=chat(text, **fields), headers=headers, timeout=20)


def endpoint(proxy: LLMProxy, rollout: AttemptedRollout) -> str:
    """Where the attempt of a rollout calls."""
    return bound(proxy, rollout).endpoint


def bound(proxy: LLMProxy, rollout: AttemptedRollout) -> LLM:
    return proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)


async def calls(store: LightningStore, rollout: AttemptedRollout, name: str = CALL) -> list[Span]:
    """The calls that a store has of an attempt, in their order."""
    spans = await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id)
    return sorted((span for span in spans if span.name == name), key=lambda span: span.sequence_id)


def record(rollout: AttemptedRollout | None = None, number: int = 0, **changes: Any) -> CallRecord:
    """A call that is over."""
    ids = ("ro-1", "at-1") if rollout is None else (rollout.rollout_id, rollout.attempt.attempt_id)
    fields: dict[str, Any] = {
        "origin": Origin(*ids),
        "dialect": CHAT,
        "trace_id": f"{number + 1:032x}",
        "span_id": f"{2 * number + 1:016x}",
        "raw_span_id": f"{2 * number + 2:016x}",
        "model": "m",
        "outcome": "answered",
        "status": 200,
        "provider": "openai",
        "backend": "m#0",
        "backend_dialect": CHAT,
        "request": b'{"model":"m","messages":[{"role":"user","content":"%d"}]}' % number,
        "response": b'{"choices":[{"index":0,"message":{"role":"assistant","content":"yes"}}]}',
    }
    return CallRecord(**{**fields, **changes})
