"""Entries of the model list become backends, and mistakes in them are told at once."""

import pickle
from typing import Any

import pytest

from agentlightning.dialects import DIALECTS
from agentlightning.errors import ConfigurationError, ProxyError
from agentlightning.llm_proxy.backends import Backend, BackendUnavailable, DialectNotServed, Try, backend_of

SECRET = "sk-very-secret-0123"


def backend(model: str, **params: Any) -> Backend:
    return backend_of({"model_name": "m", "litellm_params": {"model": model, **params}}, 0)


def hosted(**fields: Any) -> Backend:
    return backend_of(
        {"model_name": "m", "litellm_params": {"model": "hosted_vllm/up", "api_base": "http://h:1/v1"}, **fields}, 3
    )


@pytest.mark.parametrize(
    ("model", "params", "provider", "upstream", "url"),
    [
        ("openai/gpt-4.1", {}, "openai", "gpt-4.1", "https://api.openai.com/v1/chat/completions"),
        ("gpt-4.1", {}, "openai", "gpt-4.1", "https://api.openai.com/v1/chat/completions"),
        ("Qwen/Q", {"api_base": "http://h:1/v1/"}, "openai", "Qwen/Q", "http://h:1/v1/chat/completions"),
        ("lm_studio/a", {"api_base": "http://h:1/v1"}, "openai", "a", "http://h:1/v1/chat/completions"),
        ("openai/a/b", {"base_url": "http://h:1"}, "openai", "a/b", "http://h:1/chat/completions"),
        ("hosted_vllm/a/b", {"api_base": "http://h:1/v1"}, "hosted_vllm", "a/b", "http://h:1/v1/chat/completions"),
        ("vllm/a", {"api_base": "http://h:1/v1"}, "vllm", "a", "http://h:1/v1/chat/completions"),
        ("agl/a", {"api_base": "http://h:1/v1"}, "agl", "a", "http://h:1/v1/chat/completions"),
        ("a", {"api_base": "http://h:1/v1", "custom_llm_provider": "agl"}, "agl", "a", "http://h:1/v1/chat/completions"),
        ("azure/dep", {"api_base": "https://x.azure.com", "api_version": "v9"}, "azure", "dep",
         "https://x.azure.com/openai/deployments/dep/chat/completions?api-version=v9"),
        ("azure/dep", {"api_base": "https://x.azure.com/openai/v1"}, "azure", "dep",
         "https://x.azure.com/openai/v1/chat/completions"),
    ],
)  # fmt: skip
def test_prefix_names_the_provider(model: str, params: dict[str, Any], provider: str, upstream: str, url: str) -> None:
    made = backend(model, **params)

    assert (made.provider, made.model, made.url_of(DIALECTS["chat"])) == (provider, upstream, url)


@pytest.mark.parametrize("base", ["https://a.com", "https://a.com/", "https://a.com/v1", "https://a.com/v1/messages"])
@pytest.mark.parametrize("model", ["anthropic/claude-x", "claude-x"])
def test_anthropic_speaks_messages_at_any_form_of_its_address(base: str, model: str) -> None:
    made = backend(model, api_base=base, api_key=SECRET)

    assert (made.model, made.url_of(DIALECTS["messages"])) == ("claude-x", "https://a.com/v1/messages")
    assert made.headers == {"x-api-key": SECRET, "anthropic-version": "2023-06-01"}


def test_azure_sends_its_own_header_and_has_responses_beside_the_deployments() -> None:
    made = backend("azure/dep", api_base="https://x.azure.com", api_version="v9", api_key=SECRET)

    assert made.headers == {"api-key": SECRET}
    assert made.url_of(DIALECTS["responses"]) == "https://x.azure.com/openai/responses?api-version=v9"


def test_key_and_address_may_come_from_a_named_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    monkeypatch.setenv("MY_BASE", "http://h:2/v1")

    made = backend("openai/x", api_key="os.environ/MY_KEY", api_base="os.environ/MY_BASE")

    assert (made.headers["Authorization"], made.base_url) == (f"Bearer {SECRET}", "http://h:2/v1")


def test_missing_variable_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"Entry 0 .*litellm_params.api_key.*NO_SUCH_KEY is not set"):
        backend("openai/x", api_key="os.environ/NO_SUCH_KEY")


@pytest.mark.parametrize(
    ("model", "variable", "header"),
    [
        ("openai/x", "OPENAI_API_KEY", "Authorization"),
        ("anthropic/x", "ANTHROPIC_API_KEY", "x-api-key"),
        ("azure/x", "AZURE_API_KEY", "api-key"),
        ("hosted_vllm/x", "HOSTED_VLLM_API_KEY", "Authorization"),
    ],
)
def test_key_comes_from_the_provider_s_variable(
    monkeypatch: pytest.MonkeyPatch, model: str, variable: str, header: str
) -> None:
    monkeypatch.setenv(variable, SECRET)

    assert SECRET in backend(model, api_base="http://h:1").headers[header]
    assert "other-key" in backend(model, api_base="http://h:1", api_key="other-key").headers[header]


def test_address_of_openai_comes_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://h:5/v1")

    assert backend("gpt-4.1").base_url == "http://h:5/v1"


def test_server_without_an_address_is_a_mistake() -> None:
    with pytest.raises(ConfigurationError, match=r"needs litellm_params.api_base.*HOSTED_VLLM_API_BASE"):
        backend("hosted_vllm/x")


def test_provider_with_a_protocol_of_its_own_is_answered_with_the_ways_to_it() -> None:
    for options in ({}, {"custom_llm_provider": "bedrock"}):
        with pytest.raises(ConfigurationError, match=r"'bedrock'.*openai/NAME.*litellm --port"):
            backend("bedrock/x", **options)

    assert backend("ollama/llama3", api_base="http://h:1").provider == "openai"


def test_what_is_known_of_token_ids() -> None:
    known = {
        "hosted_vllm/x": True,
        "vllm/x": True,
        "agl/x": True,
        "openai/x": None,
        "anthropic/x": False,
        "azure/x": False,
    }

    assert {model: backend(model, api_base="http://h:1/v1").gives_token_ids for model in known} == known
    assert backend("openai/x").gives_token_ids is False
    assert hosted(model_info={"gives_token_ids": False}).gives_token_ids is False


def test_what_an_entry_says_is_in_the_backend() -> None:
    made = backend_of(
        {
            "model_name": "m",
            "litellm_params": {
                "model": "hosted_vllm/up",
                "api_base": "http://h:1/v1",
                "weight": 3,
                "max_parallel_requests": 4,
                "rpm": 5,
                "tpm": 6,
                "timeout": 7.5,
                "temperature": 0.5,
                "extra_body": {"top_k": 9},
                "extra_headers": {"X-Team": "one"},
                "max_retries": 3,
            },
            "model_info": {"version": 12, "input_cost_per_token": 1e-6, "dialects": ["chat", "messages"]},
            "resources_id": "rs-1",
        },
        2,
    )

    assert made.name == "m#2 at http://h:1/v1"
    assert (made.weight, made.max_parallel_requests, made.rpm, made.tpm, made.timeout) == (3.0, 4, 5, 6, 7.5)
    assert made.defaults == {"temperature": 0.5, "top_k": 9}
    assert made.headers == {"X-Team": "one"}
    assert (made.version, made.resources_id, made.input_cost_per_token) == ("12", "rs-1", 1e-6)
    assert made.dialects == ("chat", "messages")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("m", "Entry 7 of the model list is no mapping"),
        ({}, "no mapping with litellm_params"),
        ({"model_name": "m"}, "no mapping with litellm_params"),
        ({"litellm_params": {"model": "x"}}, "model_name: "),
        ({"model_name": "*/*", "litellm_params": {"model": "x"}}, "model_name: "),
        ({"model_name": "m", "litellm_params": {}}, "'m'.*: model: Field required; the form is {"),
        ({"model_name": "m", "litellm_params": {"model": "openai/"}}, "must be provider/model"),
        ({"model_name": "*", "litellm_params": {"model": "*"}}, "a provider in front"),
        (
            {"model_name": "m", "litellm_params": {"model": "x", "api_base": "h:1"}},
            "api_base must be .*http://host:port",
        ),
        ({"model_name": "m", "litellm_params": {"model": "x", "weight": 0}}, ": weight: .* greater than 0"),
        ({"model_name": "m", "litellm_params": {"model": "x", "rpm": 1.5}}, ": rpm: "),
        ({"model_name": "m", "litellm_params": {"model": "x", "timeout": "soon"}}, ": timeout: "),
        ({"model_name": "m", "litellm_params": {"model": "x", "extra_headers": {"a": "b\r\nc"}}}, "one line"),
        ({"model_name": "m", "litellm_params": {"model": "x"}, "model_info": {"dialects": ["latin"]}}, "dialects"),
        ({"model_name": "m", "litellm_params": {"model": "x"}, "model_info": {"gives_token_ids": 1}}, "gives_token"),
    ],
)
def test_bad_entry_is_named_with_the_accepted_form(entry: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        backend_of(entry, 7)


def test_secrets_are_not_shown() -> None:
    made = backend(
        "openai/x", api_base="http://user:pass-word@h:1/v1", api_key=SECRET, extra_headers={"X-Key": "other-secret"}
    )

    shown = f"{made!r} {made} {made.name}"
    assert not any(secret in shown for secret in (SECRET, "pass-word", "other-secret"))
    assert made.redacted(f"bad key {SECRET}") == "bad key [redacted]"


def test_header_of_the_entry_wins_in_any_case_of_letters() -> None:
    made = backend("openai/x", api_base="http://h:1/v1", api_key=SECRET, extra_headers={"authorization": "Token t"})

    assert made.headers == {"authorization": "Token t"}


def test_user_and_password_of_an_address_become_a_header() -> None:
    made = backend("openai/x", api_base="http://user:pw@h:1/v1")

    assert (made.base_url, made.headers) == ("http://h:1/v1", {"Authorization": "Basic dXNlcjpwdw=="})


@pytest.mark.parametrize(
    ("spoken", "client", "served"),
    [
        (["chat", "responses"], "responses", "responses"),
        (["chat", "responses"], "messages", "chat"),
        (["messages"], "chat", "messages"),
        (["messages"], "responses", "messages"),
        (["responses"], "chat", "responses"),
    ],
)
def test_client_is_served_in_a_dialect_that_can_be_translated(spoken: list[str], client: Any, served: str) -> None:
    assert hosted(model_info={"dialects": spoken}).serving(DIALECTS[client]).name == served


@pytest.mark.parametrize("client", ["completions", "embeddings"])
def test_dialect_without_a_way_is_refused_in_words(client: Any) -> None:
    with pytest.raises(DialectNotServed, match=f"'m#3 at http://h:1/v1' does not serve the {client} dialect") as caught:
        hosted(model_info={"dialects": ["messages"]}).serving(DIALECTS[client])

    assert isinstance(caught.value, ProxyError)
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    ("model_name", "model", "asked", "upstream"),
    [
        ("openai/*", "openai/*", "openai/gpt-9", "gpt-9"),
        ("*", "hosted_vllm/*", "a/b", "a/b"),
        ("team-*", "openai/prefix-*", "team-x", "prefix-x"),
        ("plain", "openai/y", "plain", "y"),
    ],
)
def test_pattern_takes_the_name_that_was_asked_for(model_name: str, model: str, asked: str, upstream: str) -> None:
    made = backend_of({"model_name": model_name, "litellm_params": {"model": model, "api_base": "http://h:1"}}, 0)

    assert made.named(asked).model == upstream


def test_errors_pickle_with_what_they_carry() -> None:
    error = BackendUnavailable("No.", tries=[Try("a", "refused")], retry_after_seconds=2.0)

    copy = pickle.loads(pickle.dumps(error))

    assert (str(copy), copy.tries, copy.retry_after_seconds, copy.http_status) == ("No.", [("a", "refused")], 2.0, 503)
