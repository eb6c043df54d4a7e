"""The dashboard on a SQLite store of a million spans: first paint in Chromium, and the pages of rollouts it reads."""

from children import Bench
from report import Figure, Outcome, Target

NAME = "dashboard"
TITLE = "15. The dashboard over {spans:,} spans"
SPANS = 1_000_000
QUICK_SPANS = 50_000
PAINT_TARGET = Target("below", 1000)
PAGE_TARGET = Target("below", 200)
SEARCH_TARGET = Target("below", 2000)


def sizes(bench: Bench) -> dict[str, int]:
    return {"spans": QUICK_SPANS if bench.is_quick else SPANS}


def measure(bench: Bench) -> Outcome:
    run = bench.run(bench.ours, "dashboard.py", "--spans", str(sizes(bench)["spans"]))
    figures = [
        Figure(f"rollouts, {page['name']}, p95", page["p95_ms"], "ms", PAGE_TARGET, f"p50 {page['p50_ms']:.1f} ms")
        for page in run["pages"]
    ]
    search = run["search"]
    figures.append(Figure("search in tasks, slowest", search["max_ms"], "ms", SEARCH_TARGET))
    figures.append(Figure("a write during a search, slowest", run["write_ms"], "ms", note="alone: milliseconds"))
    for view in run["views"]:
        note = f"its content after {view['content_ms']:.0f} ms"
        figures.append(Figure(f"first paint of {view['name']}", view["paint_ms"], "ms", PAINT_TARGET, note))
    if not run["views"]:
        figures.append(Figure("first paint", None, "ms", PAINT_TARGET, "there is no Chromium; make browser"))
    return Outcome(figures, {"run": run})
