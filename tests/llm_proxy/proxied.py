"""A proxy in front of backends, an attempt on whose behalf a test calls, and what the store holds of it afterwards."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai

from agentlightning.llm_proxy import LLMProxy
from agentlightning.semconv import CALL_SPAN, RAW_SPAN
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout, Span
from agentlightning.utils.loop_thread import LoopThread

MODEL = "stub-model"
HERE = "agentlightning.proxy"


@dataclass(frozen=True)
class Call:
    """One model call as the store tells it."""

    span: Span
    raw: Span

    @property
    def outcome(self) -> str:
        return str(self.span.attributes[f"{HERE}.outcome"])

    @property
    def status(self) -> Any:
        return self.span.attributes[f"{HERE}.http_status"]

    @property
    def tries(self) -> Any:
        return self.span.attributes[f"{HERE}.tries"]

    @property
    def error(self) -> str | None:
        return self.span.status.description

    @property
    def request_body(self) -> str:
        """As it went to the backend."""
        return str(self.raw.attributes[f"{HERE}.request_body"])

    @property
    def response_body(self) -> str:
        """As it came from the backend."""
        return str(self.raw.attributes[f"{HERE}.response_body"])

    def get(self, name: str) -> Any:
        return self.span.attributes.get(name)


class Proxied:
    """A running proxy, its store, and one attempt."""

    def __init__(self, proxy: LLMProxy, store: LightningStore, loop: LoopThread, life: ExitStack) -> None:
        self.proxy = proxy
        self.store = store
        self._loop = loop
        self._life = life
        self.rollout: AttemptedRollout = loop.run(store.start_rollout(input={"task": 1}))

    @property
    def endpoint(self) -> str:
        """The address for the attempt; Anthropic's client takes it as it is."""
        return self.proxy.as_resource(self.rollout.rollout_id, self.rollout.attempt.attempt_id, MODEL).endpoint

    def openai(self, **options: Any) -> openai.OpenAI:
        settings: dict[str, Any] = {"base_url": f"{self.endpoint}/v1", "api_key": "any", "max_retries": 0}
        return self._life.enter_context(openai.OpenAI(**{**settings, **options}))

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        settings: dict[str, Any] = {"base_url": self.endpoint, "api_key": "any", "max_retries": 0}
        return self._life.enter_context(anthropic.Anthropic(**{**settings, **options}))

    def spans(self) -> list[Span]:
        """The spans of the attempt, once all that was answered is stored."""
        assert self.proxy.flush(10.0)
        return list(self._loop.run(self.store.query_spans(self.rollout.rollout_id)))

    def calls(self) -> list[Call]:
        """The calls of the attempt in their order, each with both its spans."""
        spans = self.spans()
        raw = {span.parent_id: span for span in spans if span.name == RAW_SPAN}
        calls = [Call(span, raw[span.span_id]) for span in spans if span.name == CALL_SPAN]
        assert len(spans) == 2 * len(calls)
        return sorted(calls, key=lambda call: call.span.sequence_id)

    def only_call(self) -> Call:
        (call,) = self.calls()
        return call


def entry(
    url: str,
    dialect: str | None = None,
    *,
    model: str = MODEL,
    model_of: str = f"hosted_vllm/{MODEL}",
    **params: Any,
) -> Any:
    """One entry of a model list: a server as its provider speaks, by default vLLM, or one that has one dialect alone.

    Args:
        model_of: The provider, and the name of the model there.
    """
    if dialect == "messages":
        return {"model_name": model, "litellm_params": {"model": f"anthropic/{MODEL}", "api_base": url, **params}}
    listed = {"model": model_of, "api_base": f"{url}/v1", **params}
    info: Mapping[str, Any] = {} if dialect is None else {"dialects": [dialect]}
    return {"model_name": model, "litellm_params": listed, "model_info": info}


@contextmanager
def proxied(*entries: Any, store: LightningStore | None = None, **options: Any) -> Iterator[Proxied]:
    """A proxy for these entries that runs for the length of the block and records bodies; options are `LLMProxy`'s."""
    loop = LoopThread("proxied-store")
    with ExitStack() as life:
        life.callback(loop.stop)
        kept = store if store is not None else InMemoryLightningStore()
        proxy = LLMProxy(port=0, model_list=list(entries), store=kept, **{"raw_spans": True, **options})
        proxy.start()
        life.callback(proxy.stop)
        yield Proxied(proxy, kept, loop, life)
