"""Whether an operation costs the same however much is stored: one growing SQLite store, timed at several sizes.

Sizes are minutes apart, and meanwhile a machine may change by more than the store does. A store of 1,000 spans is
therefore timed in turns with the growing one, and the ratio of the two is judged; the ratio of the growing store to its
own figure at 1,000 spans stands beside it. The first size compares like with like: how far it is from one is the noise.
"""

from typing import Any

from children import Bench
from report import Figure, Outcome, Target

NAME = "flatness"
TITLE = "5. Cost of an operation while the store grows, relative to a store of 1,000 spans"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
QUICK_SIZES = (1_000, 10_000, 50_000)
TARGET = Target("within", 0.3)


def measure(bench: Bench) -> Outcome:
    sizes = [str(size) for size in (QUICK_SIZES if bench.is_quick else SIZES)]
    run = bench.run(bench.ours, "growing_store.py", "--sizes", *sizes)
    first = run["sizes"][0]["operations"]
    figures = [relative(operation, first, at_size) for operation in first for at_size in run["sizes"]]
    return Outcome(figures, {"run": run})


def relative(operation: str, first: dict[str, Any], at_size: dict[str, Any]) -> Figure:
    found = at_size["operations"][operation]
    of_itself = found["us"] / first[operation]["us"]
    note = f"{found['us']:.1f} us, control {found['control_us']:.1f} us; {of_itself:.2f}x of its first"
    return Figure(f"{operation} at {at_size['spans']:,}", found["us"] / found["control_us"], "x", TARGET, note)
