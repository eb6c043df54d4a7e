"""What the LLM proxy costs: against the release before last, whose proxy is LiteLLM's, in turns."""

from collections.abc import Mapping, Sequence

import baseline
from children import Bench, ChildFailed, Figures, Interpreter
from report import Figure, Outcome, Target

NAME = "proxy"
TITLE = "14. Model calls through the proxy (400 prompt ids, 32 tokens)"
RELEASE = "0.2.2"
ROUNDS = 3
IMPORTS = 5
MANY = ("--requests", "1500")
FEW = ("--requests", "100")
"""The release takes ten times as long."""


def measure(bench: Bench) -> Outcome:
    release = found_release(bench)
    cases: dict[str, tuple[object, ...]] = {
        "whole": (bench.ours, "proxy.py", *MANY),
        "streamed": (bench.ours, "proxy.py", *MANY, "--stream"),
    }
    if release is not None:
        cases["release, whole"] = (release, "proxy.py", *FEW)
    runs = bench.alternate(cases, 1 if bench.is_quick else ROUNDS)
    imports = [bench.run(bench.ours, "import_proxy.py") for _ in range(IMPORTS)]
    memory = bench.run(bench.ours, "proxy_memory.py", "--calls", "20000" if bench.is_quick else "100000")
    figures = [*times(runs), *rates(runs), *accounted(runs), *memory_figures(memory)]
    figures.append(Figure("import", min(run["import_s"] for run in imports), "s", Target("below", 1)))
    return Outcome(figures, {**runs, "memory": [memory]})


def found_release(bench: Bench) -> Interpreter | None:
    """Without it there are no ratios."""
    try:
        return baseline.find_or_install(bench.folder, bench.tell, RELEASE)
    except (ChildFailed, OSError) as error:
        bench.tell(f"no release {RELEASE} to compare with: {error}")
        return None


def times(runs: Mapping[str, Sequence[Figures]]) -> list[Figure]:
    """Added to a call that is alone; of the runs, the quietest."""
    added = sorted(run["proxy_1"]["p50_ms"] - run["direct_1"]["p50_ms"] for run in runs["whole"])
    first = sorted(run["proxy_1"]["first_byte_ms"] - run["direct_1"]["first_byte_ms"] for run in runs["streamed"])
    return [
        Figure("added to a call, p50", added[0], "ms", Target("below", 1.5), _listed(added)),
        Figure("added to the first token of a stream, p50", first[0], "ms", Target("below", 3), _listed(first)),
    ]


def rates(runs: Mapping[str, Sequence[Figures]]) -> list[Figure]:
    figures = []
    for concurrency in (16, 64):
        name = f"proxy_{concurrency}"
        ours = sorted(run[name]["calls_per_s"] for run in runs["whole"])
        theirs = sorted(run[name]["calls_per_s"] for run in runs.get("release, whole", ()))
        figures.append(Figure(f"{concurrency} at once", ours[-1], "calls/s", note=_listed(ours)))
        ratio = ours[-1] / theirs[-1] if theirs else None
        note = _listed(theirs, "release: ")
        figures.append(Figure(f"{concurrency} at once / release {RELEASE}", ratio, "x", Target("at least", 12), note))
    streamed = sorted(run["proxy_16"]["calls_per_s"] for run in runs["streamed"])
    figures.append(Figure("16 streams at once", streamed[-1], "calls/s", note=_listed(streamed)))
    return figures


def accounted(runs: Mapping[str, Sequence[Figures]]) -> list[Figure]:
    missing = sum(run["calls"] - run["stored"] for name in ("whole", "streamed") for run in runs[name])
    return [Figure("calls that the store does not have", missing, "", Target("below", 1))]


def memory_figures(memory: Figures) -> list[Figure]:
    grown = memory["late_mb"] / memory["early_mb"]
    return [
        Figure("RSS of a proxy alone", memory["late_mb"], "MB", Target("below", 150), f"{memory['calls']:,} calls"),
        Figure(
            "RSS at the end / at call 10,000", grown, "x", Target("below", 1.1), f"from {memory['early_mb']:.0f} MB"
        ),
    ]


def _listed(values: Sequence[float], before: str = "runs: ") -> str:
    return before + ", ".join(f"{value:,.2f}" if value < 100 else f"{value:,.0f}" for value in values) if values else ""
