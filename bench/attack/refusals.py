"""Attacks that are to be refused: each request has an answer that it must get, and the log stays free of tracebacks."""

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import attempts
from loads import CHAT, CONNECT_ERRORS, ENQUEUE, MEGABYTE, answer_of, status_of, unexpected
from servers import Site, running, signed

EVIL = "http://evil.example"
BACKSTAGE = ("/metrics", "/openapi.json")
DEEP = {"900 levels": 900, "100,000 levels": 100_000}


@dataclass(frozen=True)
class Refusal:
    """One attack, and what went wrong with it."""

    name: str
    findings: str
    kind: str
    complaint: str | None


@dataclass(frozen=True)
class Attempted:
    """An attack on a site that others attack too."""

    name: str
    findings: str
    kind: str
    run: Callable[[Site], Awaitable[str | None]]
    is_locked: bool = True


# ---------------------------------------------------------------------- web pages


def foreign_page(verb: str, path: str) -> Callable[[Site], Awaitable[str | None]]:
    """The three ways in which somebody else's page calls."""

    async def attack(site: Site) -> str | None:
        found = []
        for headers in (
            {"Origin": EVIL},
            {"Host": f"evil.example:{site.target.port}"},
            {"Sec-Fetch-Site": "cross-site"},
        ):
            status, _, _ = await answer_of(site.target, verb, path, headers=headers, data=b"{}")
            found.append(status)
        return unexpected(found, 403)

    return attack


# ---------------------------------------------------------------------- bodies


async def permission_before_body(site: Site) -> str | None:
    """A body that is announced and never sent: whoever may not send it is refused at once."""
    runner, attempt = signed("runner"), signed("attempt", "r", "a")
    cases = [
        (ENQUEUE, attempt, 60 * MEGABYTE, b"403"),
        (ENQUEUE, runner, 1000, b"403"),
        ("/v1/agl/spans", runner, 9 * MEGABYTE, b"413"),
        ("/v1/agl/spans", attempt, 9 * MEGABYTE, b"413"),
        ("/v1/traces", signed("reader"), 1000, b"403"),
    ]
    for path, token, length, expected in cases:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        status = await first_status(site.target.port, f"{head}Content-Length: {length}\r\n\r\n".encode())
        if status != expected:
            return f"answered {status!r} instead of {expected!r} to {length} bytes for {path}"
    return None


async def first_status(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        return (await asyncio.wait_for(reader.readline(), 20)).split(b" ")[1]
    except (*CONNECT_ERRORS, IndexError) as error:
        return repr(error).encode()
    finally:
        writer.transport.abort()


def deep_json(*paths: str) -> Callable[[Site], Awaitable[str | None]]:
    """Lists within lists: refused with 400, in words."""

    async def attack(site: Site) -> str | None:
        for path, (name, levels) in itertools.product(paths, DEEP.items()):
            field = "messages" if "chat" in path else "input"
            body = f'{{"model": "m", "{field}": {"[" * levels}{"]" * levels}}}'
            status, _, text = await answer_of(site.target, "POST", path, data=body.encode())
            if status not in (400, 422) or "Recursion" in text:
                return f"answered {status} to {name} at {path}: {text[:100]}"
        return None

    return attack


async def long_ids(site: Site) -> str | None:
    long = "x" * 8000
    cases = [
        ("/v1/agl/queues/rollouts/dequeue", {"limit": 1, "claim_id": long}),
        ("/v1/agl/queues/rollouts/dequeue", {"limit": 1, "worker_id": long}),
        ("/v1/agl/queues/rollouts/enqueue-one", {"input": 1, "rollout_id": long}),
        (f"/v1/agl/workers/{long}", {}),
    ]
    statuses = [await status_of(site.target, path, json.dumps(body).encode()) for path, body in cases]
    return unexpected(statuses, 400, 422)


async def legacy_bodies(site: Site) -> str | None:
    statuses = [
        await first_status(site.target.port, b"POST /rollout HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"),
        await first_status(
            site.target.port,
            f"POST /task HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {signed('runner')}\r\n"
            "Content-Length: 300000000\r\n\r\n".encode(),
        ),
        await first_status(
            site.target.port,
            f"POST /rollout HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {signed('runner')}\r\n"
            "Content-Length: 300000000\r\n\r\n".encode(),
        ),
    ]
    return None if statuses == [b"401", b"403", b"413"] else f"answered {statuses}"


# ---------------------------------------------------------------------- what tokens show


async def narrow_tokens(site: Site) -> str | None:
    """An attempt reads nothing, a reader no secrets and changes nothing."""
    server, attempt, reader = site.target, signed("attempt", "r", "a"), signed("reader")
    secret = "sk-a-secret-of-the-operator"
    resources = {"llm": {"resource_type": "llm", "endpoint": "http://x", "model": "m", "api_key": secret}}
    status, _, text = await answer_of(server, "POST", "/v1/agl/resources", json=resources)
    if status not in (200, 201):
        return f"resources were answered {status}: {text[:100]}"
    _, _, shown = await answer_of(server, "GET", "/v1/agl/resources/latest", token=reader)
    if secret in shown or "llm" not in shown:
        return "a reader sees the key of a model"
    paths = ["/v1/agl/rollouts", "/v1/agl/resources/latest", "/v1/agl/statistics", *BACKSTAGE]
    found = [(await answer_of(server, "GET", path, token=attempt))[0] for path in paths]
    found += [(await answer_of(server, "POST", "/v1/agl/rollouts", token=reader, json={"input": 1}))[0]]
    found += [(await answer_of(server, "POST", "/v1/agl/queues/rollouts/dequeue", token=reader, json={}))[0]]
    return unexpected(found, 403)


async def damaged_tokens(site: Site) -> str | None:
    whole = signed("reader")
    shown = [whole[:-1], whole + "x", whole.replace(".", "", 1), whole.swapcase(), "agl1..", "x" * 5000, "null"]
    found = [(await answer_of(site.target, "GET", "/v1/agl/statistics", token=token))[0] for token in shown]
    return unexpected(found, 401)


async def headers_of_answers(site: Site) -> str | None:
    for path in ("/v1/agl/statistics", "/health", "/docs", "/nothing"):
        _, headers, _ = await answer_of(site.target, "GET", path)
        if headers.get("x-content-type-options") != "nosniff":
            return f"{path} comes without nosniff"
        if path == "/docs" and "content-security-policy" not in headers:
            return "/docs comes without a content security policy"
    return None


async def ids_are_bound(site: Site) -> str | None:
    """What one runner has claimed under an id is given again to it, and to no other."""
    await answer_of(site.target, "POST", "/v1/agl/queues/rollouts/enqueue-one", json={"input": 1})
    claims = []
    for token in (signed("runner"), signed("runner"), signed("runner", ends_at=4e9)):
        body = {"limit": 1, "worker_id": "w", "claim_id": "bound"}
        _, _, text = await answer_of(site.target, "POST", "/v1/agl/queues/rollouts/dequeue", token=token, json=body)
        claims.append([claim["rollout_id"] for claim in json.loads(text)])
    mine, again, others = claims
    return None if mine and mine == again and not others else f"claimed {claims}"


async def private_files(site: Site) -> str | None:
    """What a server keeps is for its account alone."""
    modes = {path.name: path.stat().st_mode & 0o777 for path in site.folder.glob("runs.db*")}
    return None if modes and set(modes.values()) == {0o600} else f"the files have the modes {modes}"


async def foreign_metrics(site: Site) -> str | None:
    point = {"name": "reward", "value": 1.0, "step": 1}
    status, _, text = await answer_of(site.target, "POST", "/v1/agl/runs/none/metrics", json={"metrics": [point]})
    return None if status in (404, 422) else f"answered {status}: {text[:100]}"


async def odd_archives(site: Site) -> str | None:
    """`store import` of records that are none: an error in words, and no new file."""
    for kind in ([], {}, ["rollout"], 5, None):
        source, target = site.folder / "odd.jsonl", site.folder / "odd.db"
        source.write_text(json.dumps({"kind": kind}) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "agentlightning.cli", "store", "import", str(target), str(source)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0 or "Traceback" in done.stderr or target.exists():
            return f"kind {kind!r}: exit code {done.returncode}, {done.stderr[-200:]}"
    return None


# ---------------------------------------------------------------------- the proxy


async def proxy_keys(site: Site) -> str | None:
    """The address of a backend is not the caller's to choose, and the state of the proxy not an attempt's to see."""
    server, body = site.target, {"model": "m", "messages": [{"role": "user", "content": "Well?"}]}
    taken: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(await reader.read(1000))
        writer.close()

    listener = await asyncio.start_server(listen, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
    for field in ("api_base", "base_url", "extra_headers"):
        await answer_of(server, "POST", CHAT, json={**body, field: address})
    listener.close()
    if taken:
        return "the proxy called the address that a caller named"
    found = [(await answer_of(server, "GET", path, token="wrong"))[0] for path in ("/agl/status", "/v1/models")]
    found += [(await answer_of(server, "POST", CHAT, token="wrong", json=body))[0]]
    return unexpected(found, 401)


async def empty_key(site: Site) -> str | None:
    """A proxy whose key is empty must not start."""
    program = "from agentlightning import LLMProxy; LLMProxy(model_list=[], api_key='')"
    command = [sys.executable, "-c", program]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    return None if done.returncode and "ConfigurationError" in done.stderr else "it was made"


ATTEMPTED = [
    Attempted("pages of other sites", "2, 7", "store", foreign_page("GET", "/v1/agl/statistics"), is_locked=False),
    Attempted("pages of other sites", "2", "proxy", foreign_page("POST", CHAT), is_locked=False),
    Attempted("pages of other sites", "2", "engine", foreign_page("POST", "/agl/weights"), is_locked=False),
    Attempted("pages of other sites", "15", "legacy", foreign_page("POST", "/rollout"), is_locked=False),
    Attempted("permission before body", "6", "store", permission_before_body),
    Attempted("size and token of the v0.1 protocol", "15", "legacy", legacy_bodies),
    Attempted("tokens of attempts and readers", "5, 22", "store", narrow_tokens),
    Attempted("damaged tokens", "5", "store", damaged_tokens),
    Attempted("headers against browsers' guesses", "23", "store", headers_of_answers),
    Attempted("the id of another caller's claim", "24", "store", ids_are_bound),
    Attempted("files of other accounts", "14", "store", private_files),
    Attempted("long ids", "16", "store", long_ids),
    Attempted("forged lines and commands in the log", "9", "store", attempts.forged_log),
    Attempted("sequence number 2**53-1", "10", "store", attempts.far_number),
    Attempted("spans without end", "4", "store", attempts.flood),
    Attempted("a reward after the end", "6", "store", attempts.late_reward),
    Attempted("the key of a cancelled rollout", "7", "proxy", attempts.cancelled_key),
    Attempted("the secret of a locked proxy", "5", "legacy", attempts.legacy_secret),
    Attempted("secrets of a run", "12", "store", attempts.masked_runs),
    Attempted("numbers and text that are none", "15", "store", attempts.odd_numbers),
    Attempted("deep JSON", "20", "store", deep_json("/v1/agl/queues/rollouts/enqueue-one", "/v1/agl/spans")),
    Attempted("deep JSON", "20", "proxy", deep_json(CHAT, "/v1/embeddings")),
    Attempted("deep JSON", "20", "engine", deep_json(CHAT)),
    Attempted("deep JSON", "20", "legacy", deep_json("/rollout")),
    Attempted("metrics of no run", "21", "store", foreign_metrics),
    Attempted("archives of odd records", "21", "store", odd_archives),
    Attempted("addresses and keys of the proxy", "1, 22", "proxy", proxy_keys),
    Attempted("an empty key", "12", "proxy", empty_key),
]


def results(only: str) -> Iterator[Refusal]:
    """Attack one server of each kind, with and without a key."""
    wanted = [each for each in ATTEMPTED if only in f"{each.kind} {each.name}"]
    for kind, is_locked in sorted({(each.kind, each.is_locked) for each in wanted}):
        with running(kind, is_locked=is_locked) as site:
            log = site.target.log
            for each in wanted:
                if (each.kind, each.is_locked) == (kind, is_locked):
                    yield Refusal(each.name, each.findings, each.kind, checked(each, site, log))


def checked(each: Attempted, site: Site, log: Path) -> str | None:
    seen = len(log.read_text(errors="replace"))
    try:
        complaint = asyncio.run(each.run(site))
    except CONNECT_ERRORS as error:
        return f"the attack broke: {error!r}"
    if complaint is None and "Traceback" in log.read_text(errors="replace")[seen:]:
        return "there is a traceback in the log"
    return complaint
