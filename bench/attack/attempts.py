"""Attacks with the token or the key of one attempt, and with what it may write: nobody else is harmed by it."""

import json
import time
from typing import Any

import aiohttp
from loads import CHAT, LIVE, answer_of, session
from servers import PROXY_KEY, Server, Site, signed

from agentlightning.types import Span
from agentlightning.types.resources import PROXY_SECRET_PREFIX, derive_attempt_key

REWARD = "agentlightning.reward.0.value"
MOST_SPANS = 100_000
BATCH = 10_000
ENDED_SECONDS = 10.0
"""In which the key of an ended attempt is refused; proxies ask a store about an attempt every few seconds."""


def span_of(ids: dict[str, str], number: int = 1, name: str = "s", **attributes: Any) -> dict[str, Any]:
    """The JSON of a span."""
    span = Span.from_attributes(
        attributes=attributes, sequence_id=number, name=name, start_time=1.0, end_time=2.0, **ids
    )
    return span.model_dump(mode="json")


async def begin(server: Server, **rollout: Any) -> dict[str, str]:
    """The ids of a rollout and its attempt, which runs."""
    _, _, text = await answer_of(server, "POST", "/v1/agl/rollouts", json={"input": 1, **rollout})
    begun = json.loads(text)
    return {"rollout_id": begun["rollout_id"], "attempt_id": begun["attempt"]["attempt_id"]}


async def write(server: Server, ids: dict[str, str], span: dict[str, Any]) -> tuple[int, str]:
    """Write a span with the token of its attempt."""
    token = signed("attempt", *ids.values())
    status, _, text = await answer_of(server, "POST", "/v1/agl/spans", token=token, json=span)
    return status, text


async def forged_log(site: Site) -> str | None:
    """A reward that is none, in a span whose name is a command to a terminal and a line of a log."""
    ids = await begin(site.target)
    name = "\x1b]0;mine\x07\n2026-01-01 00:00:00,000 [INFO] all is well"
    status, text = await write(site.target, ids, span_of(ids, name=name, **{REWARD: "none"}))
    log = site.target.log.read_text(errors="replace")
    if status not in (200, 201):
        return f"answered {status}: {text[:100]}"
    return "the log has it as it is" if "\x1b" in log or "\n2026-01-01 00:00:00,000" in log else None


async def far_number(site: Site) -> str | None:
    """The first attempt numbers a span 2**53 - 1; the next attempt must still be able to write."""
    ids = await begin(site.target)
    await write(site.target, ids, span_of(ids, 2**53 - 1))
    _, _, text = await answer_of(site.target, "POST", f"/v1/agl/rollouts/{ids['rollout_id']}/attempts", json={})
    ids["attempt_id"] = json.loads(text)["attempt"]["attempt_id"]
    _, _, text = await answer_of(site.target, "POST", "/v1/agl/spans/next", json=ids)
    status, text = await write(site.target, ids, span_of(ids, json.loads(text)["sequence_id"]))
    return None if status in (200, 201) else f"answered {status}: {text[:100]}"


async def flood(site: Site) -> str | None:
    """Spans without end: the attempt's quota stops them, and another attempt still writes."""
    ids = await begin(site.target)
    token = signed("attempt", *ids.values())
    for first in range(1, MOST_SPANS + 2, BATCH):
        batch = [span_of(ids, number) for number in range(first, first + BATCH)]
        status, _, text = await answer_of(
            site.target, "POST", "/v1/agl/spans/batch", token=token, json={"spans": batch}
        )
        if status == 413:
            break
        if status not in (200, 201):
            return f"answered {status}: {text[:100]}"
    else:
        return f"{first + BATCH - 1:,} spans were taken"
    other = await begin(site.target)
    status, text = await write(site.target, other, span_of(other))
    return None if status in (200, 201) else f"another attempt was answered {status}: {text[:100]}"


async def late_reward(site: Site) -> str | None:
    """A reward after the end of its rollout, by the token of its attempt."""
    ids = await begin(site.target)
    path = f"/v1/agl/rollouts/{ids['rollout_id']}"
    await write(site.target, ids, span_of(ids, **{REWARD: 0.0}))
    await answer_of(site.target, "POST", f"{path}/attempts/{ids['attempt_id']}", json={"status": "failed"})
    status, text = await write(site.target, ids, span_of(ids, 2, **{REWARD: 77.0}))
    _, _, shown = await answer_of(site.target, "GET", path)
    reward = json.loads(shown).get("reward")
    return None if reward in (0.0, None) else f"the reward is {reward} after an answer of {status}: {text[:100]}"


async def cancelled_key(site: Site) -> str | None:
    """The key of an attempt whose rollout was cancelled buys no model calls."""
    store = site.servers["store"]
    ids = await begin(store)
    key = derive_attempt_key(PROXY_SECRET_PREFIX + PROXY_KEY, ids["rollout_id"], ids["attempt_id"])
    path = f"/rollout/{ids['rollout_id']}/attempt/{ids['attempt_id']}{CHAT}"
    body = {"model": "m", "messages": [{"role": "user", "content": "Well?"}]}
    status, _, text = await answer_of(site.target, "POST", path, token=key, json=body)
    if status != 200:
        return f"a running attempt was answered {status}: {text[:100]}"
    await answer_of(store, "POST", f"/v1/agl/rollouts/{ids['rollout_id']}", json={"status": "cancelled"})
    deadline = time.monotonic() + ENDED_SECONDS
    while status == 200 and time.monotonic() < deadline:
        status, _, text = await answer_of(site.target, "POST", path, token=key, json=body)
    return None if status == 401 else f"answered {status} {ENDED_SECONDS:g} s after the end: {text[:100]}"


async def masked_runs(site: Site) -> str | None:
    """Secrets in the configuration and the metadata of a run, under names that people give them."""
    secret = "sk-a-secret-of-the-operator"
    names = ("accesstoken", "clientsecret", "pwd", "dsn", "Cookie", "api_key_2")
    values: dict[str, Any] = {**dict.fromkeys(names, secret), "url": f"postgresql://me:{secret}@host/db"}
    values["argv"] = ["train.py", "--api-key", secret]
    body = {"name": "masked", "config": values, "metadata": values}
    status, _, text = await answer_of(site.target, "POST", "/v1/agl/runs", json=body)
    if status not in (200, 201):
        return f"answered {status}: {text[:100]}"
    _, _, shown = await answer_of(site.target, "GET", "/v1/agl/runs", token=signed("reader"))
    return "a reader sees them" if secret in shown or "masked" not in shown else None


async def odd_numbers(site: Site) -> str | None:
    """A number of 64 bits in a query, and a text that is not UTF-8 on the live channel: no traceback."""
    status, _, text = await answer_of(site.target, "POST", "/v1/agl/rollouts/search", json={"step_in": [2**64 - 1]})
    if status not in (400, 422):
        return f"answered {status}: {text[:100]}"
    async with session(site.target) as client, client.ws_connect(LIVE) as channel:
        transport = channel._response.connection.transport  # type: ignore[union-attr]
        transport.write(b"\x81\x82\x00\x00\x00\x00\xff\xfe")  # a text of two bytes, masked with zeros
        answer = await channel.receive(timeout=10)
    return None if answer.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED) else f"answered {answer!r}"


async def legacy_secret(site: Site) -> str | None:
    """A runner at a v0.1 server reads the resources, in which there is the secret of a locked proxy."""
    secret = "agl-proxy-of-the-operator"
    llm = {"resource_type": "proxy_llm", "endpoint": "http://127.0.0.1:9", "model": "m", "api_key": secret}
    body = {"resources": {"main_llm": llm}}
    status, _, text = await answer_of(site.target, "POST", "/resources", json=body)
    if status not in (200, 201):
        return f"answered {status}: {text[:100]}"
    _, _, shown = await answer_of(site.target, "GET", "/resources/latest", token=signed("runner"))
    return "a runner sees it" if secret in shown or "main_llm" not in shown else None
