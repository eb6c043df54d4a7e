"""`agl proxy` as a process of its own: it serves, records, and ends without losing a call."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from agentlightning.cli.models import models_of
from agentlightning.cli.proxy import main as proxy_command
from agentlightning.cli.proxy import proxy_of
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient, SqliteLightningStore
from agentlightning.types import AttemptedRollout, Span
from agentlightning.types.resources import derive_attempt_key
from tests import warm_python
from tests.e2e.server_process import ServerProcess
from tests.stub_model.script import Answer, Script
from tests.stub_model.server import StubModel

PATIENCE_SECONDS = 30.0
LARGEST_RSS = 150 * 1024**2
KEY = "a-key-of-the-proxy-0123456789"
PROVIDER_KEY = "sk-of-the-provider-0123456789"
MESSAGES: Any = [{"role": "user", "content": "Hello there"}]


class Serving:
    """The command, and what it said."""

    popen: type[subprocess.Popen[Any]] = warm_python.Popen

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AGL_", "OPENAI_"))}
        self.process = self.popen(
            [sys.executable, "-m", "agentlightning.cli", "proxy", *arguments],
            cwd=folder,
            env={**kept, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        self.url = ""

    def begin(self) -> "Serving":
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if found := re.search(r" at (http://[\w.:]+) ", line):
                self.url = found[1]
                return self
        raise AssertionError(f"it ended with {self.process.wait()}: {self.said}")

    def end(self, number: signal.Signals | None = None) -> int:
        if number is not None:
            self.process.send_signal(number)
        _, rest = self.process.communicate(timeout=PATIENCE_SECONDS)
        self.said += rest
        return self.process.returncode

    def base_url(self, rollout: AttemptedRollout) -> str:
        return f"{self.url}/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}/v1"


Start = Callable[..., Serving]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Serving] = []

    def begin(*arguments: str, **environment: str) -> Serving:
        running.append(Serving(tmp_path, *arguments, **environment))
        return running[-1]

    yield begin
    for one in running:
        one.process.kill()
        one.process.communicate()


def model_option(model: StubModel) -> tuple[str, str]:
    return "--model", f"stub-model={model.openai_url}"


def ask(base_url: str, api_key: str = "unused", **options: Any) -> str:
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = client.chat.completions.create(model=options.pop("model", "stub-model"), messages=MESSAGES, **options)
    return str(answer.choices[0].message.content)


async def calls_of(store: LightningStore, rollout: AttemptedRollout) -> list[Span]:
    return [span for span in await store.query_spans(rollout.rollout_id) if span.name == "litellm_request"]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


# ---------------------------------------------------------------------- serving


async def test_calls_are_recorded_in_a_store_of_another_process(
    start: Start, stub_model: StubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Serving, "popen", subprocess.Popen)  # its memory is measured
    with ServerProcess() as server:
        async with LightningStoreClient(server.url) as store:
            rollout = await store.start_rollout({"n": 1})
            proxy = start(*model_option(stub_model), "--store", server.url, "--port", "0").begin()
            said = await asyncio.to_thread(ask, proxy.base_url(rollout))
            resident = psutil.Process(proxy.process.pid).memory_info().rss
            code = await asyncio.to_thread(proxy.end, signal.SIGTERM)
            (call,) = await calls_of(store, rollout)

    assert (said, code) == ("Hello there", 0)
    assert call.attributes["gen_ai.usage.completion_tokens"] == 3
    assert f"Serving stub-model at {proxy.url} (calls are recorded in {server.url})" in proxy.said
    assert "1 model call stored, 0 lost." in proxy.said
    assert resident < LARGEST_RSS


@pytest.mark.parametrize(("number", "expected_code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_a_signal_lets_calls_in_flight_finish_and_stores_them(
    start: Start, stub_model: StubModel, tmp_path: Path, number: signal.Signals, expected_code: int
) -> None:
    stub_model.script = Script([Answer("done", latency_seconds=0.5)] * 3)
    async with SqliteLightningStore(tmp_path / "runs.db") as store:
        rollout = await store.start_rollout({"n": 1})
        proxy = start(*model_option(stub_model), "--store", "sqlite:///runs.db", "--port", "0").begin()
        asking = [asyncio.create_task(asyncio.to_thread(ask, proxy.base_url(rollout))) for _ in range(3)]
        await asyncio.to_thread(until, lambda: len(stub_model.requests) == 3, "the model was not asked")
        code = await asyncio.to_thread(proxy.end, number)
        answers = await asyncio.gather(*asking)
        calls = await calls_of(store, rollout)

    assert (answers, code, len(calls)) == (["done"] * 3, expected_code, 3)
    assert "3 model calls stored, 0 lost." in proxy.said


def test_without_a_store_it_says_that_nothing_is_kept(start: Start, stub_model: StubModel) -> None:
    proxy = start(*model_option(stub_model), "--port", "0").begin()

    assert ask(f"{proxy.url}/v1") == "Hello there"
    assert proxy.end(signal.SIGTERM) == 0
    assert "calls are kept in memory" in proxy.said
    assert "1 served for no rollout and not recorded" in proxy.said


def test_a_key_from_the_environment_is_asked_for(start: Start, stub_model: StubModel) -> None:
    proxy = start(*model_option(stub_model), "--port", "0", AGL_PROXY_API_KEY=KEY).begin()

    with pytest.raises(openai.AuthenticationError):
        ask(f"{proxy.url}/v1")
    assert ask(f"{proxy.url}/v1", api_key=KEY) == "Hello there"
    proxy.end(signal.SIGTERM)
    assert KEY not in proxy.said


async def test_the_key_of_an_attempt_is_known_to_another_process(start: Start, stub_model: StubModel) -> None:
    with ServerProcess() as server:
        async with LightningStoreClient(server.url) as store:
            rollout = await store.start_rollout({"n": 1})
            key = derive_attempt_key(f"agl-proxy-{KEY}", rollout.rollout_id, rollout.attempt.attempt_id)
            options = (*model_option(stub_model), "--store", server.url, "--port", "0")
            proxy = start(*options, AGL_PROXY_API_KEY=KEY).begin()
            said = await asyncio.to_thread(ask, f"{proxy.url}/v1", key)
            await asyncio.to_thread(proxy.end, signal.SIGTERM)

            assert said == "Hello there"
            assert len(await calls_of(store, rollout)) == 1


async def test_a_budget_is_kept(start: Start, stub_model: StubModel, tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "runs.db") as store:
        rollouts = [await store.start_rollout(n) for n in range(3)]
        options = ("--store", "runs.db", "--port", "0", "--max-calls", "1", "--run-max-calls", "2")
        proxy = start(*model_option(stub_model), *options).begin()
        await asyncio.to_thread(ask, proxy.base_url(rollouts[0]))

        with pytest.raises(openai.PermissionDeniedError, match="budget of this rollout"):
            await asyncio.to_thread(ask, proxy.base_url(rollouts[0]))
        await asyncio.to_thread(ask, proxy.base_url(rollouts[1]))
        with pytest.raises(openai.PermissionDeniedError, match="budget of this run"):
            await asyncio.to_thread(ask, proxy.base_url(rollouts[2]))


def test_models_of_a_file_are_served_with_keys_of_the_environment(
    start: Start, stub_model: StubModel, tmp_path: Path
) -> None:
    stub_model.api_key = PROVIDER_KEY
    params = {"model": "openai/stub-model", "api_base": stub_model.openai_url, "api_key": "os.environ/THE_KEY"}
    config = json.dumps({"model_list": [{"model_name": "nice-name", "litellm_params": params}]})
    (tmp_path / "models.yaml").write_text(config)  # JSON is YAML too

    proxy = start("--config", "models.yaml", "--port", "0", THE_KEY=PROVIDER_KEY).begin()

    assert ask(f"{proxy.url}/v1", model="nice-name") == "Hello there"
    proxy.end(signal.SIGTERM)
    assert PROVIDER_KEY not in proxy.said


# ---------------------------------------------------------------------- what goes wrong


async def test_a_store_that_does_not_answer_is_told_and_waited_for(start: Start, stub_model: StubModel) -> None:
    server = ServerProcess()
    proxy = start(*model_option(stub_model), "--port", "0", "--store", server.url).begin()

    assert "The store does not answer; calls are served, and wait for it." in proxy.said
    with server:
        async with LightningStoreClient(server.url) as store:
            rollout = await store.start_rollout({"n": 1})
            await asyncio.to_thread(ask, proxy.base_url(rollout))
            await asyncio.to_thread(proxy.end, signal.SIGTERM)
            assert len(await calls_of(store, rollout)) == 1


@pytest.mark.parametrize(
    ("arguments", "retries", "seconds"),
    [([], 5, 30.0), (["--retries", "0", "--deadline", "7"], 0, 7.0)],
    ids=["of the file", "of the command line"],
)
def test_settings_of_a_file_hold_unless_the_command_says_otherwise(
    tmp_path: Path, arguments: list[str], retries: int, seconds: float
) -> None:
    entry = {"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": "http://127.0.0.1:9/v1"}}
    settings = {"num_retries": 5, "request_timeout": 30}
    (tmp_path / "models.json").write_text(json.dumps({"model_list": [entry], "litellm_settings": settings}))
    parsed = proxy_command.parser().parse_args(["--config", str(tmp_path / "models.json"), *arguments])

    proxy = proxy_of(parsed, models_of(parsed), InMemoryLightningStore(), api_key=None)

    assert proxy.litellm_config["litellm_settings"]["num_retries"] == retries
    assert proxy._settings.deadline_seconds == seconds
