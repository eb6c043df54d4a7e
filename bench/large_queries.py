"""Queries on a SQLite store of a million spans, and the memory of the process that filled and asked it."""

from children import Bench
from report import Figure, Outcome, Target

NAME = "million"
TITLE = "4. A SQLite store of {spans:,} spans"
SPANS = 1_000_000
QUICK_SPANS = 50_000
SPANS_TARGET = Target("below", 5)
PAGE_TARGET = Target("below", 20)
RSS_TARGET = Target("below", 400)


def sizes(bench: Bench) -> dict[str, int]:
    return {"spans": QUICK_SPANS if bench.is_quick else SPANS}


def measure(bench: Bench) -> Outcome:
    run = bench.run(bench.ours, "large_store.py", "--spans", str(sizes(bench)["spans"]))
    spans, queuing = run["query_spans"], run["queuing"]
    figures = [
        Figure("query_spans of a rollout, p50", spans["p50_ms"], "ms"),
        Figure("query_spans of a rollout, p95", spans["p95_ms"], "ms", SPANS_TARGET, "300 random rollouts"),
    ]
    for page in run["pages"]:
        name = f"100 rollouts at offset {page['offset']:,}, p95"
        figures.append(Figure(name, page["p95_ms"], "ms", PAGE_TARGET, f"p50 {page['p50_ms']:.2f} ms"))
    figures += [
        Figure("10 queuing rollouts, p95", queuing["p95_ms"], "ms", note=f"p50 {queuing['p50_ms']:.2f} ms"),
        Figure("peak RSS", run["peak_rss_mb"], "MB", RSS_TARGET, f"{run['fill_peak_rss_mb']:.0f} MB when filled"),
        Figure("time to fill", run["fill_seconds"], "s"),
        Figure("size on disk", run["file_mb"], "MB"),
    ]
    return Outcome(figures, {"run": run})
