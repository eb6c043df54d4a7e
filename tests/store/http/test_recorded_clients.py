"""Requests of public clients, recorded against their own servers: 0.3.0 is answered alike, 0.2.2 is told why not."""

import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from agentlightning.store import LightningStoreServer

RECORDED = Path(__file__).parent / "recorded"
IDS = re.compile(r"\b(?:ro|at|rs)-[0-9a-f]{8,12}\b")
TIED = {"query_rollouts_new"}
"""Sorted by start time, which rollouts of one batch share here: either order is right."""
VARYING = {"uptime", "total_span_bytes", "eviction_threshold_bytes", "safe_threshold_bytes", "memory_capacity_bytes"}
MISSING = {"get_rollout_missing": (200, "null"), "update_rollout_missing": (404, None)}
"""What 0.3.0 answered with 500: ours says that nothing has that id."""


class Translation:
    """Recorded ids -> those our server gave in their place."""

    def __init__(self) -> None:
        self.ours: dict[str, str] = {}

    def translated(self, text: str) -> str:
        return IDS.sub(lambda match: self.ours.get(match[0], match[0]), text)

    def learn(self, recorded: Any, answered: Any) -> None:
        """Pair the ids that stand at the same places of two answers."""
        if isinstance(recorded, dict) and isinstance(answered, dict):
            for key in recorded.keys() & answered.keys():
                self.learn(recorded[key], answered[key])
        elif isinstance(recorded, list) and isinstance(answered, list):
            for one, other in zip(recorded, answered, strict=False):
                self.learn(one, other)
        elif isinstance(recorded, str) and isinstance(answered, str) and IDS.fullmatch(recorded):
            self.ours.setdefault(recorded, answered)


def differences(recorded: Any, answered: Any, place: str = "answer") -> list[str]:
    """Where our answer lacks something that was recorded; times and sizes need only be of the same kind."""
    if isinstance(recorded, dict) and isinstance(answered, dict):
        missing = [f"{place}.{key} is missing" for key in recorded if key not in answered]
        shared = [key for key in recorded if key in answered]
        return missing + [
            found for key in shared for found in differences(recorded[key], answered[key], f"{place}.{key}")
        ]
    if isinstance(recorded, list) and isinstance(answered, list) and len(recorded) == len(answered):
        pairs = zip(recorded, answered, strict=True)
        return [found for n, (one, other) in enumerate(pairs) for found in differences(one, other, f"{place}[{n}]")]
    name = place.rpartition(".")[2]
    if name.endswith("_time") or name in VARYING:
        return [] if (recorded is None) == (answered is None) else [f"{place}: {recorded!r} became {answered!r}"]
    return [] if recorded == answered else [f"{place}: {recorded!r} became {answered!r}"]


def exchanges(release: str) -> list[dict[str, Any]]:
    """The recorded requests; of a batch of spans sent one by one only the first was recorded, so another is added."""
    recorded: list[dict[str, Any]] = json.loads((RECORDED / f"{release}.json").read_text())
    first = next((n for n, exchange in enumerate(recorded) if exchange["call"] == "add_many_spans"), None)
    if first is not None:
        other = json.loads(re.sub(r"(0{15,31}|: ?)6\b", r"\g<1>7", json.dumps(recorded[first])))
        recorded.insert(first + 1, other)
    return recorded


async def test_client_of_0_2_2_is_told_to_use_other_routes(
    serve: Callable[..., Awaitable[LightningStoreServer]],
) -> None:
    server = await serve()
    answers = []
    async with aiohttp.ClientSession() as session:
        for exchange in exchanges("0.2.2"):
            if exchange["path"] != "/health":
                async with session.request(exchange["method"], server.endpoint + exchange["path"]) as response:
                    answers.append((response.status, "/v1/agl" in await response.text()))

    assert set(answers) == {(410, True)}


async def test_recorded_requests_are_answered_as_their_own_server_did(
    serve: Callable[..., Awaitable[LightningStoreServer]],
) -> None:
    server, translation, wrong = await serve(), Translation(), []

    async with aiohttp.ClientSession() as session:
        for exchange in exchanges("0.3.0"):
            path, body = map(translation.translated, (exchange["path"], exchange["body"]))
            headers = {"Content-Type": "application/json"} if body else {}
            sending = session.request(exchange["method"], server.endpoint + path, data=body or None, headers=headers)
            async with sending as response:
                status, text = response.status, await response.text()
            recorded = json.loads(exchange["answer"])
            translation.learn(recorded, json.loads(text))
            wrong += compared(exchange, json.loads(translation.translated(exchange["answer"])), status, text)

    assert wrong == [], "\n".join(wrong)


def compared(exchange: dict[str, Any], recorded: Any, status: int, text: str) -> list[str]:
    """What is wrong with the answer to one recorded request."""
    expected, told = MISSING.get(exchange["call"], (exchange["status"], None))
    if exchange["call"] in MISSING and exchange["status"] >= 400:
        return [] if status == expected and told in (None, text) else [f"{exchange['call']}: {status} {text}"]
    if status != exchange["status"]:
        return [f"{exchange['call']}: {status} instead of {exchange['status']}: {text}"]
    answered = json.loads(text)
    if exchange["call"] in TIED:
        for page in (recorded, answered):
            page["items"].sort(key=lambda item: json.dumps(item["input"]))
    return [f"{exchange['call']}: {found}" for found in differences(recorded, answered)]


def test_recordings_hold_a_whole_session() -> None:
    assert {release: len(exchanges(release)) for release in ("0.2.2", "0.3.0")} == {"0.2.2": 29, "0.3.0": 46}
