"""What a model of the resources says about calls of other clients, and the key that an attempt gets for it."""

from typing import Any

import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.types import LLM, Attempt, AttemptedRollout, ProxyLLM, ResourcesUpdate
from agentlightning.types.resources import AttemptKey, read_attempt_key

SECRET = "agl-proxy-0123456789"
OPEN = {"redirect", "redirect_exclude"}


def attempted() -> AttemptedRollout:
    attempt = Attempt(rollout_id="R", attempt_id="A", sequence_id=1, start_time=0.0)
    return AttemptedRollout(rollout_id="R", input=None, start_time=0.0, attempt=attempt)


@pytest.mark.parametrize("kind", [LLM, ProxyLLM])
def test_what_is_left_open_is_not_written(kind: type[LLM]) -> None:
    llm = kind(endpoint="e", model="m")

    assert (llm.redirect, llm.redirect_exclude) == (None, [])
    assert OPEN.isdisjoint(llm.model_dump())
    assert "redirect" not in llm.model_dump_json()


@pytest.mark.parametrize("kind", [LLM, ProxyLLM])
@pytest.mark.parametrize("said", [{"redirect": True}, {"redirect": False, "redirect_exclude": ["gpt-*"]}], ids=str)
def test_what_is_said_survives_the_wire(kind: type[LLM], said: dict[str, Any]) -> None:
    update = ResourcesUpdate(resources_id="rs-1", resources={"llm": kind(endpoint="e", model="m", **said)})

    copy = ResourcesUpdate.model_validate_json(update.model_dump_json())

    assert copy == update
    assert {name: value for name, value in copy.resources["llm"].model_dump().items() if name in OPEN} == said


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_the_schema_names_every_field(mode: Any) -> None:
    assert {"endpoint", "model", *OPEN} <= set(LLM.model_json_schema(mode=mode)["properties"])


def test_secret_of_a_proxy_becomes_a_key_of_the_attempt() -> None:
    llm = ProxyLLM(endpoint="http://h:1", model="m", api_key=SECRET, redirect=False).with_attempted_rollout(attempted())

    assert llm.api_key is not None
    assert read_attempt_key(SECRET, llm.api_key) == AttemptKey("R", "A")
    assert SECRET not in llm.model_dump_json()


@pytest.mark.parametrize("key", [None, "", "sk-of-the-user"])
def test_any_other_key_is_given_as_it_is(key: str | None) -> None:
    llm = ProxyLLM(endpoint="http://h:1", model="m", api_key=key)

    assert llm.with_attempted_rollout(attempted()).api_key == key
    assert llm.get_api_key("R", "A") == key


def test_a_reference_to_the_secret_of_a_proxy_is_no_key() -> None:
    llm = ProxyLLM(endpoint="http://h:1", model="m", api_key="agl-proxyref-0123")
    for bind in (lambda: llm.get_api_key("R", "A"), lambda: llm.with_attempted_rollout(attempted())):
        with pytest.raises(ConfigurationError, match="attempt 'A' for the LLM proxy at http://h:1 did not come"):
            bind()
