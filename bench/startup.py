"""What `import agentlightning` costs: the best of five fresh interpreters, and which heavy packages come along.

Names are loaded on first touch, so beside the import stands what a program pays until it has its first store.
"""

from children import Bench
from report import Figure, Outcome

NAME = "import"
TITLE = "6. import agentlightning"
RUNS = 5


def measure(bench: Bench) -> Outcome:
    bench.run(bench.ours, "import_package.py")  # compiles what has no bytecode yet
    runs = [bench.run(bench.ours, "import_package.py") for _ in range(RUNS)]
    slowest = {key: max(run[key] for run in runs) for key in ("import_ms", "first_store_ms")}
    best = min(runs, key=lambda run: float(run["first_store_ms"]))
    import_ms = min(run["import_ms"] for run in runs)
    first_ms = best["first_store_ms"]
    figures = [
        Figure("import", import_ms, "ms", note=f"slowest {slowest['import_ms']:.1f} ms"),
        Figure("import and first store", first_ms, "ms", note=f"slowest {slowest['first_store_ms']:.0f} ms"),
        Figure("RSS then", best["rss_mb"], "MB", note=f"{best['added_rss_mb']} MB more than before the import"),
        Figure("heavy packages after the import", ", ".join(best["heavy_at_import"]) or "none"),
        Figure("heavy packages of all public names", ", ".join(best["heavy_of_all_names"]) or "none"),
        Figure("modules of all public names", best["modules"]),
    ]
    return Outcome(figures, {"runs": runs})
