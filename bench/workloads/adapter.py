"""Spans to triplets; run it with the interpreter that has the package to measure. Prints one JSON line.

The trace is flat under one root, as an agent of many turns leaves it: in each turn a model call, a tool and a reward.
It uses nothing but the public API, so that any release since 0.2.2 can be measured by the same file.
"""

import argparse
import importlib
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

PROMPT_TOKENS = list(range(64))
ANSWER_TOKENS = list(range(16))
CALL = "openai.chat.completion"
SPANS_A_TURN = 3
ROOT = f"{1:016x}"
REWARD = {"reward": 1.0, "agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 1.0}
"""Each release reads its own format."""


def make_span(number: int, parent: str | None, name: str, times: tuple[float, float], attributes: Any) -> Any:
    types: Any = importlib.import_module("agentlightning.types")
    return types.Span(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=number,
        trace_id=f"{1:032x}",
        span_id=f"{number:016x}",
        parent_id=parent,
        name=name,
        status=types.TraceStatus(status_code="OK"),
        attributes=attributes,
        events=[],
        links=[],
        start_time=times[0],
        end_time=times[1],
        context=None,
        parent=None,
        resource=types.OtelResource(attributes={}, schema_url=""),
    )


def trace(count: int) -> list[Any]:
    """At least so many spans."""
    spans = [make_span(1, None, "agent.run", (0.0, 1e6), {"agent.name": "solver"})]
    while len(spans) < count:
        turn = len(spans) // SPANS_A_TURN
        number, start = len(spans) + 1, 1.0 + 2 * turn
        ids = {"prompt_token_ids": PROMPT_TOKENS, "response_token_ids": ANSWER_TOKENS}
        call = {"gen_ai.response.id": f"r{number}", **ids}
        spans += [
            make_span(number, ROOT, CALL, (start, start + 1.0), call),
            make_span(number + 1, ROOT, "tool.call", (start + 1.1, start + 1.4), {"tool.name": "calc"}),
            make_span(number + 2, ROOT, "agentlightning.reward", (start + 1.5, start + 1.6), REWARD),
        ]
    return spans


def best_seconds(spans: Sequence[Any], repeats: int) -> float:
    """The least disturbed of several runs."""
    adapter_module: Any = importlib.import_module("agentlightning.adapter")
    calls = sum(span.name == CALL for span in spans)
    taken: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        triplets = adapter_module.TracerTraceToTriplet().adapt(list(spans))
        taken.append(time.perf_counter() - started)
        if len(triplets) != calls or any(triplet.reward != 1.0 for triplet in triplets):
            raise SystemExit(f"{len(triplets)} triplets of {calls} calls, or wrong rewards; the figures mean nothing.")
        del triplets  # freeing them is not part of the next run
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="+", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    seconds = {str(size): round(best_seconds(trace(size), options.repeats), 6) for size in options.sizes}
    print(json.dumps({"version": importlib.import_module("agentlightning").__version__, "seconds": seconds}))


if __name__ == "__main__":
    main()
