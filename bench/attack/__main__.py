"""`make attack`: attacks fresh servers on this machine, and prints what each attack did to everybody else.

Every attack meets a server of its own, on a free port of 127.0.0.1. While it lasts another client reads a rollout fifty
times a second (of a proxy or an engine, the list of models), and the memory of the server is watched. An attack has
failed to do harm if 99 of 100 reads took at most 250 ms, or three times what they took without an attack; if the server
grew by 250 MB at most; and if it answered as it should. Exits with 1 if one did harm. Takes ten minutes at most, and
stops all that it has started.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import loads
import refusals
from servers import Server, Site, running

MEGABYTE = 1024**2
LIMIT_SECONDS = 600.0
RESERVE_SECONDS = 60.0
"""Left at the end for the attack that is under way."""
LEAST_BAR_SECONDS = 0.25
BAR_FACTOR = 3
MOST_GROWTH_MEGABYTES = 250
BASELINE_SECONDS = 5.0
ATTACK_SECONDS = 60.0
LISTS = b'{"rollouts":[' + b"[]," * (20 * MEGABYTE) + b"[]]}"
DIGITS = b'{"rollouts":[{"input":"' + b"1" * 19 + b'"},' + b'{"input":1},' * (5 * MEGABYTE) + b'{"input":1}]}'
MESSAGES = b'{"model":"m","messages":[' + b'{"role":"user","content":"x"},' * 1_000_000 + b"{}]}"


@dataclass(frozen=True)
class Load:
    """One attack that costs time or memory."""

    name: str
    findings: str
    """Numbers of the weaknesses that it looks for, as the report on security counts them."""
    kind: str
    run: loads.Load
    is_locked: bool = True


LOADS = [
    Load("1,000,000 empty gzip members", "4", "store", loads.gzip_members),
    Load("60 MB of empty lists", "6", "store", loads.large_body(LISTS, (413,))),
    Load("60 MB with a long number", "6", "store", loads.large_body(DIGITS, (413,))),
    Load("60 MB by an attempt", "6", "store", loads.large_body(LISTS, (403,), token=loads.signed("attempt", "r", "a"))),
    Load("99,001 rollouts in one body", "6", "store", loads.many_rollouts),
    Load("query of 30,000 rollouts", "6", "store", loads.all_rollouts),
    Load("query of 100 rollouts of 1 MB", "16", "store", loads.large_rollouts),
    Load("600 silent or slow connections", "11, 16", "store", loads.silent_connections),
    Load("header of 8 MB", "11", "store", loads.large_header),
    Load("500 subscribers that do not read", "16", "store", loads.deaf_subscribers),
    Load("200 queries of 20 MB that nobody reads", "1", "store", loads.unread_answers),
    Load("pages of 24 MB read at 16 kB/s", "3", "store", loads.slow_reader),
    Load("40 records of 7 MB that nobody reads", "1", "store", loads.unread_records),
    Load("50,000 waits on a connection", "16", "store", loads.waiting_calls),
    Load("1,000 long polls", "16", "store", loads.long_polls),
    Load("6,000 ids of 8 kB", "16", "store", loads.long_ids),
    Load("60,000 kinds of garbage", "16", "store", loads.garbage),
    Load("answers of 30 MB", "10", "proxy", loads.call_model("large", (200,))),
    Load("answers of 100 MB", "10", "proxy", loads.call_model("huge", (502,))),
    Load("answers of 10,000,000 values", "10", "proxy", loads.call_model("values", (502,))),
    Load("endless events", "10", "proxy", loads.call_model("endless", (200, 0), stream=True)),
    Load("1,000,000 messages", "10", "proxy", loads.large_body(MESSAGES, (413,), path=loads.CHAT)),
    Load("20,000 unknown attempts", "16", "proxy", loads.many_unknown_attempts, is_locked=False),
    Load("600 silent or slow connections", "11", "proxy", loads.silent_connections),
    Load("header of 8 MB", "11", "proxy", loads.large_header),
    Load("1,000,000 messages", "10", "engine", loads.large_body(MESSAGES, (413,), path=loads.CHAT)),
    Load("600 silent or slow connections", "11", "engine", loads.silent_connections),
    Load("header of 8 MB", "11", "engine", loads.large_header),
    Load("header of 8 MB", "11", "legacy", loads.large_header),
    Load("60 MB of empty lists", "15", "legacy", loads.large_body(LISTS, (413,), path="/rollout")),
]


@dataclass
class Outcome:
    """What an attack did."""

    name: str
    findings: str
    kind: str
    complaint: str | None
    p99: float | None = None
    worst: float | None = None
    bar: float | None = None
    growth: float | None = None

    @property
    def verdict(self) -> str:
        reasons = [] if self.complaint is None else [self.complaint]
        if self.p99 is not None and self.bar is not None and self.p99 > self.bar:
            reasons.append(f"others wait longer than {self.bar * 1000:.0f} ms")
        if self.growth is not None and self.growth > MOST_GROWTH_MEGABYTES:
            reasons.append(f"memory grows by more than {MOST_GROWTH_MEGABYTES} MB")
        return "FAILED: " + "; ".join(reasons) if reasons else "held"

    def row(self) -> str:
        p99 = "" if self.p99 is None or self.worst is None else f"{self.p99 * 1000:.0f} ms ({self.worst * 1000:.0f})"
        growth = "" if self.growth is None else f"{self.growth:.0f} MB"
        return f"{self.findings:>7}  {self.kind:7} {self.name:44} {p99:>20} {growth:>8}  {self.verdict}"


def read_path(server: Server) -> str:
    """What the other client reads."""
    if server.kind != "store":
        return f"{server.url}/task" if server.kind == "legacy" else f"{server.url}/v1/models"
    body = json.dumps({"input": 1, "rollout_id": "read-by-another"}).encode()
    headers = {"Content-Type": "application/json", **server.headers()}
    request = urllib.request.Request(f"{server.url}/v1/agl/queues/rollouts/enqueue-one", body, headers)
    with urllib.request.urlopen(request, timeout=30):
        return f"{server.url}/v1/agl/rollouts/read-by-another"


@contextmanager
def other_client(url: str, server: Server) -> Iterator[list[float]]:
    """Another client reads for the length of the block; at its end the list holds how long it waited each time."""
    command = [sys.executable, str(Path(__file__).with_name("other_client.py")), url]
    command += [] if server.key is None else [server.key]
    latencies: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield latencies
            output, _ = process.communicate(timeout=90)
            latencies += json.loads(output)
        finally:
            process.kill()


def percentile(latencies: list[float], share: float) -> float:
    return sorted(latencies)[min(int(len(latencies) * share), len(latencies) - 1)]


def measure_baseline(kind: str, backend: str) -> float:
    """What 99 of 100 reads take at most while nobody attacks."""
    with running(kind, backend=backend) as site, other_client(read_path(site.target), site.target) as latencies:
        time.sleep(BASELINE_SECONDS)
    return percentile(latencies, 0.99)


def measure(load: Load, bar: float, backend: str) -> Outcome:
    with running(load.kind, is_locked=load.is_locked, backend=backend) as site:
        target = site.target
        with other_client(read_path(target), target) as latencies:
            complaint = attacked(load, site)
        if not target.is_alive:
            complaint = "the server is dead"
        elif "Traceback" in target.log.read_text(errors="replace"):
            complaint = complaint or "there is a traceback in the log"
        growth = (target.peak_bytes - target.idle_bytes) / MEGABYTE
    return Outcome(
        load.name,
        load.findings,
        load.kind,
        complaint,
        p99=percentile(latencies, 0.99),
        worst=max(latencies),
        bar=bar,
        growth=growth,
    )


def attacked(load: Load, site: Site) -> str | None:
    """Attack from another process, one that takes no time from the servers: attackers come from other machines."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def attack() -> None:
        os.nice(10)
        try:
            sending.send(asyncio.run(load.run(site)))  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 # an attack that breaks is reported with the others
            sending.send(f"the attack broke: {error!r}")

    process = context.Process(target=attack)
    process.start()
    sending.close()
    try:
        if not receiving.poll(ATTACK_SECONDS):
            return f"the attack took longer than {ATTACK_SECONDS:.0f} s"
        complaint: str | None = receiving.recv()
        return complaint
    except EOFError:
        return "the attack broke"
    finally:
        process.kill()
        process.join()


def outcomes(only: str, backend: str) -> Iterator[Outcome]:
    """What every attack did, as it is known; attacks for which there is no time are reported as such."""
    deadline = time.monotonic() + LIMIT_SECONDS - RESERVE_SECONDS
    for refusal in refusals.results(only):
        yield Outcome(refusal.name, refusal.findings, refusal.kind, refusal.complaint)
    bars: dict[str, float] = {}
    for load in [load for load in LOADS if only in f"{load.kind} {load.name}"]:
        if time.monotonic() > deadline:
            yield Outcome(load.name, load.findings, load.kind, "no time was left for it")
            continue
        if load.kind not in bars:
            bars[load.kind] = max(LEAST_BAR_SECONDS, BAR_FACTOR * measure_baseline(load.kind, backend))
        yield measure(load, bars[load.kind], backend)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="attacks whose kind of server and name hold this text")
    parser.add_argument("--backend", choices=["sqlite", "memory"], default="sqlite", help="of the stores")
    arguments = parser.parse_args()
    found: list[Outcome] = []
    print(f"finding  server  {'attack':44} {'p99 (worst) of others':>20} {'memory':>8}  verdict", flush=True)
    for outcome in outcomes(arguments.only, arguments.backend):
        found.append(outcome)
        print(outcome.row(), flush=True)
    failed = [outcome for outcome in found if outcome.verdict != "held"]
    print(f"{len(found) - len(failed)} of {len(found)} attacks did no harm.")
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
