"""The dashboard on 100,000 rollouts: the pages it reads of every back end, and first paint over a million spans."""

from children import Bench, Figures
from report import Figure, Outcome, Target

NAME = "dashboard"
TITLE = "15. The dashboard over {spans:,} spans"
SPANS = 1_000_000
QUICK_SPANS = 50_000
STORES = {"sqlite": "SQLite", "memory": "memory", "postgres": "PostgreSQL"}
PAINT_TARGET = Target("below", 1000)
PAGE_TARGET = Target("below", 200)
SEARCH_TARGET = Target("below", 2000)


def sizes(bench: Bench) -> dict[str, int]:
    return {"spans": QUICK_SPANS if bench.is_quick else SPANS}


def measure(bench: Bench) -> Outcome:
    spans = str(sizes(bench)["spans"])
    runs = {kind: bench.run(bench.ours, "dashboard.py", "--spans", spans, "--store", kind) for kind in STORES}
    figures = [figure for kind, run in runs.items() for figure in _pages(STORES[kind], run)]
    views = runs["sqlite"]["views"]
    for view in views:
        note = f"its content after {view['content_ms']:.0f} ms"
        figures.append(Figure(f"first paint of {view['name']}", view["paint_ms"], "ms", PAINT_TARGET, note))
    if not views:
        figures.append(Figure("first paint", None, "ms", PAINT_TARGET, "there is no Chromium; make browser"))
    return Outcome(figures, {"runs": runs})


def _pages(store: str, run: Figures) -> list[Figure]:
    """The slowest page of rollouts, and the search, of one back end."""
    if not run["pages"]:
        return [Figure(f"{store}: pages of rollouts", None, "ms", PAGE_TARGET, "it is not installed; make postgres")]
    slowest = max(run["pages"], key=lambda page: page["p95_ms"])
    note = f"of {len(run['pages'])} kinds of filters and orders: {slowest['name']}"
    return [
        Figure(f"{store}: the slowest page of rollouts, p95", slowest["p95_ms"], "ms", PAGE_TARGET, note),
        Figure(f"{store}: search in tasks, slowest", run["search"]["max_ms"], "ms", SEARCH_TARGET),
        Figure(f"{store}: a write during a search, slowest", run["write_ms"], "ms", note="alone: milliseconds"),
    ]
