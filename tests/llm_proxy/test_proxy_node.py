"""The proxy as OpenAI's client for Node sees it; skipped where Node or npm is missing.

All calls are made by one process, since starting Node takes longer than they do.
"""

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.llm_proxy.openai_suite import WEATHER
from tests.llm_proxy.proxied import MODEL, Call, entry, proxied
from tests.stub_model.script import Answer, Failure, Request, Script, Turn
from tests.stub_model.server import running

HERE = Path(__file__).parent / "node"
ROOT = HERE.parents[2]
CLIENTS = ROOT / ".node-clients"
INSTALL_SECONDS, RUN_SECONDS = 90.0, 60.0


@dataclass(frozen=True)
class Run:
    """What the client told, and what was recorded of it."""

    told: dict[str, Any]
    calls: list[Call]

    def calls_about(self, text: str) -> list[Call]:
        return [call for call in self.calls if call.get("gen_ai.prompt.0.content") == text]


def react(request: Request) -> Turn:
    """What the stub model says to each scenario."""
    text = request.text
    if text.startswith("fail "):
        return Failure(int(text.removeprefix("fail ")), "no luck")
    turns: dict[str, Turn] = {
        "use a tool": Answer("I look.", (WEATHER,)),
        "rain": "It rains.",
        "break": Answer("one two three", cut_after_events=2, cut_with=Failure(500, "out of luck")),
        "wait": Failure(429, "slow down", retry_after_seconds=7),
        "be late": Answer("late", latency_seconds=30.0),
        "be slow": Answer("one" + " more" * 100, pause_seconds=0.1),
    }
    return turns.get(text, text)


@pytest.fixture(scope="module")
def clients() -> Path:
    """The folder in which the client is installed."""
    for program in ("node", "npm", "make"):
        if shutil.which(program) is None:
            pytest.skip(f"'{program}' is not installed")
    CLIENTS.mkdir(exist_ok=True)
    with (CLIENTS / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers may get here at once
        made = subprocess.run(
            ["make", "node-clients"], cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
        )
    if made.returncode != 0:
        pytest.skip(f"the client for Node cannot be installed: {made.stderr.strip()[-500:]}")
    return CLIENTS


@pytest.fixture(scope="module")
def run(clients: Path) -> Iterator[Run]:
    with running(Script(react)) as model, proxied(entry(model.url)) as door:
        done = subprocess.run(
            ["node", str(HERE / "client.mjs"), f"{door.endpoint}/v1"],
            env={**os.environ, "NODE_CLIENTS": str(clients)},
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        yield Run(json.loads(done.stdout), door.calls())


def test_chat_without_what_was_not_asked_for(run: Run) -> None:
    chat = run.told["chat"]

    assert chat["text"] == "Hello there"
    assert not {"prompt_token_ids", "response_token_ids"} & set(chat["fields"])
    assert "token_ids" not in chat["choice"]


@pytest.mark.parametrize(
    ("scenario", "told"),
    [
        ("tools", {"arguments": {"city": "Oslo"}, "text": "It rains."}),
        ("choices", ["Hi", "Hi"]),
        ("json", {"text": "Hi"}),
        ("stream", {"text": "Hello there", "usage": 0}),
        ("collected_stream", {"text": "I look.", "arguments": {"city": "Oslo"}}),
        ("completion", "one two"),
        ("response", "Hello there"),
        ("response_stream", {"text": "Hello there", "final": "Hello there"}),
        ("embeddings", [16, 16]),
        ("models", {"names": [MODEL], "retrieved": MODEL}),
        ("retry_after", "7"),
        ("timeout", "APIConnectionTimeoutError"),
        ("abort", "one"),
    ],
)
def test_scenario(run: Run, scenario: str, told: Any) -> None:
    assert run.told[scenario] == told


def test_raw_answer(run: Run) -> None:
    raw = run.told["raw"]

    assert (raw["text"], raw["status"]) == ("Hi", 200)
    assert raw["id"].startswith("chatcmpl")


def test_each_failure_raises_its_own_error(run: Run) -> None:
    assert run.told["errors"] == {
        "400": ["BadRequestError", 400, True],
        "401": ["AuthenticationError", 401, True],
        "403": ["PermissionDeniedError", 403, True],
        "404": ["NotFoundError", 404, True],
        "409": ["ConflictError", 409, True],
        "422": ["UnprocessableEntityError", 422, True],
        "429": ["RateLimitError", 429, True],
        "500": ["InternalServerError", 500, True],
        "503": ["InternalServerError", 503, True],
    }


def test_error_within_a_stream(run: Run) -> None:
    told = run.told["error_in_stream"]

    assert (told["text"], told["kind"]) == ("one", "APIError")
    assert "out of luck" in told["message"]


def test_calls_that_were_left_are_recorded(run: Run) -> None:
    (late,), (slow,) = run.calls_about("be late"), run.calls_about("be slow")

    assert (late.outcome, slow.outcome) == ("cancelled", "cancelled")
    assert slow.get("gen_ai.completion.0.content").startswith("one")
    assert slow.get("response_token_ids") is not None


def test_every_call_is_recorded_with_its_tokens(run: Run) -> None:
    calls = [call for call in run.calls_about("Hello there") if call.get("agentlightning.proxy.dialect") == "chat"]

    assert [call.get("agentlightning.proxy.token_ids") for call in calls] == ["given", "given"]
    assert calls[0].get("response_token_ids") == calls[1].get("response_token_ids")
