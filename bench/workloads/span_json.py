"""One span to JSON and back; run it with the interpreter that has the package to measure. Prints one JSON line.

The span is that of the store workload. Each figure is the best of several rounds, in microseconds a span.
"""

import json
import timeit
from collections.abc import Callable
from typing import Any

from store import make_span, package

ROUNDS = 7
ROUND_SECONDS = 0.2
"""About how long one round takes."""


def best_us(call: Callable[[], Any]) -> float:
    """Microseconds of one call, in the least disturbed round."""
    timer = timeit.Timer(call)
    loops, seconds = timer.autorange()
    loops = max(1, int(loops * ROUND_SECONDS / seconds))
    return min(timer.repeat(ROUNDS, loops)) / loops * 1e6


def main() -> None:
    span = make_span("ro-1", "at-1", 1)
    text = span.model_dump_json()
    model = type(span)
    if model.model_validate_json(text) != span:
        raise SystemExit("A span does not come back from JSON as it was; the figures would mean nothing.")
    figures = {
        "version": package().__version__,
        "json_bytes": len(text),
        "to_json_us": round(best_us(span.model_dump_json), 3),
        "from_json_us": round(best_us(lambda: model.model_validate_json(text)), 3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
