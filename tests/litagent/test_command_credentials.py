"""What programs are given of the credentials around them: those of their own attempt, and no others."""

import json
import logging
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.litagent.command import CommandAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from agentlightning.store.http.tokens import Scope, sign_token, verify_token
from agentlightning.tracer import OtelTracer
from agentlightning.types import LLM, NamedResources, PromptTemplate, ProxyLLM
from tests.litagent.workbench import Workbench

pytestmark = pytest.mark.usefixtures("no_process_is_left")

MASTER = "the-master-token-of-this-server"
SAVE = "import json, os; open(os.environ['AGL_ROLLOUT_ID'], 'w').write(json.dumps(dict(os.environ)))"
PROMPT: NamedResources = {"prompt": PromptTemplate(template="Be brief.", engine="f-string")}
WARNING = "programs get no token"


def runner_token() -> str:
    return sign_token(MASTER, Scope("runner"), expires_at=None)


def saving(folder: Path, **options: Any) -> CommandAgent:
    """Saves its environment in a file that is called like its rollout."""
    return CommandAgent([sys.executable, "-c", SAVE], cwd=folder, reward_from="none", **options)


@pytest.fixture
async def server() -> AsyncIterator[LightningStoreServer]:
    started = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0, token=MASTER)
    await started.start()
    yield started
    await started.stop()


async def environments(
    server: LightningStoreServer, agent: Any, folder: Path, *, count: int = 1, resources: NamedResources = PROMPT
) -> list[dict[str, str]]:
    """What the programs of some rollouts saw, run by a runner that has a runner's token."""
    await server.add_resources(resources)
    rollouts = [await server.enqueue_rollout(f"task {number}") for number in range(count)]
    runner = LitAgentRunner[Any](OtelTracer(instrument=False), max_rollouts=count, heartbeat_interval=0)
    store = LightningStoreClient(server.endpoint, token=runner_token())
    try:
        with runner.run_context(agent=agent, store=store):
            await runner.iter()
    finally:
        await store.close()
    return [json.loads((folder / rollout.rollout_id).read_text()) for rollout in rollouts]


# ---------------------------------------------------------------------- the store's token


async def test_programs_of_a_runner_with_a_runner_s_token_get_their_attempt_s(
    server: LightningStoreServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGL_STORE_TOKEN", runner_token())

    told = await environments(server, saving(tmp_path), tmp_path, count=3)

    for variables in told:
        scope = verify_token(MASTER, variables["AGL_STORE_TOKEN"], time.time())
        assert scope == Scope("attempt", variables["AGL_ROLLOUT_ID"], variables["AGL_ATTEMPT_ID"])
        header = f"Authorization=Bearer%20{variables['AGL_STORE_TOKEN']}"
        assert variables["OTEL_EXPORTER_OTLP_TRACES_HEADERS"] == header
        assert runner_token() not in str(variables)


async def test_without_a_claim_s_token_a_runner_s_is_not_handed_on(
    server: LightningStoreServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("AGL_STORE_TOKEN", runner_token())
    await server.add_resources(PROMPT)
    store = LightningStoreClient(server.endpoint)
    runner = LitAgentRunner[Any](OtelTracer(instrument=False), heartbeat_interval=0)

    with caplog.at_level(logging.WARNING), runner.run_context(agent=saving(tmp_path), store=store):
        rollouts = [await runner.step("task") for _ in range(2)]
    await store.close()

    for rollout in rollouts:
        told = json.loads((tmp_path / rollout.rollout_id).read_text())
        assert "AGL_STORE_TOKEN" not in told
        assert "agl1." not in str(told)
    assert caplog.text.count(WARNING) == 1
    assert "agl1." not in caplog.text


# ---------------------------------------------------------------------- what is inherited

SECRETS = {
    "GITHUB_TOKEN": "ghp-of-the-user",
    "AWS_ACCESS_KEY_ID": "AKIA-of-the-user",
    "DB_PASSWORD": "password-of-the-user",
    "ANTHROPIC_AUTH_TOKEN": "anthropic-of-the-user",
    "OPENAI_API_KEY": "sk-of-the-user",
}
OURS = {"AGL_PROXY_API_KEY": "key-of-the-proxy", "AGL_STORE_TOKEN": "a-master-token", "AGL_OTHER_SECRET": "another"}
PROXIED = ProxyLLM(endpoint="http://127.0.0.1:9", model="m")


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, **OURS, "HARMLESS": "seen", "AWS_CA_BUNDLE": "a-path"}.items():
        monkeypatch.setenv(name, value)


async def told_to(folder: Path, resources: NamedResources = PROMPT, **options: Any) -> dict[str, str]:
    outcome = await Workbench().run(saving(folder, **options), resources=resources)
    told: dict[str, str] = json.loads((folder / outcome.attempt.rollout_id).read_text())
    return told


def seen_in(told: dict[str, str]) -> set[str]:
    """The secrets of the runner's environment whose values a program saw."""
    return {name for name, value in {**SECRETS, **OURS}.items() if value in str(told)}


@pytest.mark.usefixtures("secrets")
async def test_a_program_with_a_model_inherits_no_credentials(tmp_path: Path, llm: LLM) -> None:
    for model in (llm, PROXIED):
        told = await told_to(tmp_path, {"llm": model})

        assert seen_in(told) == set()
        assert (told["HARMLESS"], told["AWS_CA_BUNDLE"]) == ("seen", "a-path")
        assert told["OPENAI_API_KEY"] == (model.api_key or "unused")


@pytest.mark.usefixtures("secrets")
async def test_a_program_without_a_model_inherits_all_credentials_but_ours(tmp_path: Path) -> None:
    assert seen_in(await told_to(tmp_path)) == set(SECRETS)


@pytest.mark.usefixtures("secrets")
async def test_a_model_without_a_key_leaves_the_keys_of_the_sdks(tmp_path: Path) -> None:
    told = await told_to(tmp_path, {"llm": LLM(endpoint="http://127.0.0.1:9/v1", model="m")})
    assert (seen_in(told), told["OPENAI_API_KEY"]) == ({"OPENAI_API_KEY"}, "sk-of-the-user")


@pytest.mark.usefixtures("secrets")
async def test_credentials_that_the_user_names_are_given(tmp_path: Path, llm: LLM) -> None:
    told = await told_to(tmp_path, {"llm": llm}, env={"GITHUB_TOKEN": SECRETS["GITHUB_TOKEN"]})
    assert seen_in(told) == {"GITHUB_TOKEN"}


@pytest.mark.usefixtures("secrets")
async def test_credentials_that_are_withheld_are_named_in_the_log(
    tmp_path: Path, llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="agentlightning.litagent.command"):
        await told_to(tmp_path, {"llm": llm}, env={"GITHUB_TOKEN": "given"})

    (record,) = [record for record in caplog.records if "DB_PASSWORD" in record.getMessage()]
    assert "GITHUB_TOKEN" not in record.getMessage()
    assert "name in env=" in record.getMessage()
    assert "password-of-the-user" not in caplog.text


@pytest.mark.usefixtures("secrets")
async def test_withheld_credentials_in_the_command_are_in_no_span(llm: LLM) -> None:
    outcome = await Workbench().run(CommandAgent(["echo", SECRETS["DB_PASSWORD"]]), resources={"llm": llm})
    written = json.dumps([span.model_dump(mode="json") for span in outcome.spans])
    assert outcome.span("command.stdout") is not None
    assert SECRETS["DB_PASSWORD"] not in written
