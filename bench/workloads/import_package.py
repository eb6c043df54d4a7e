"""What `import agentlightning` costs a fresh interpreter: time, memory, and which heavy packages come along.

The package loads its names on first touch, so the import alone says little: the first store is timed too, and heavy
packages are looked for again after every public name was touched. Prints one JSON line. It imports next to nothing
itself, because what is already loaded would cost the package nothing.
"""

import json
import sys
import time

HEAVY = (
    "agentops",
    "aiohttp",
    "datasets",
    "fastapi",
    "flask",
    "graphviz",
    "httpdbg",
    "litellm",
    "numpy",
    "openai",
    "pandas",
    "poml",
    "ray",
    "torch",
    "transformers",
    "uvicorn",
    "verl",
    "vllm",
)
"""Packages that take a noticeable part of a second or hundreds of megabytes to load."""
KIB = 1024


def rss_mb() -> float | None:
    """Memory held now; None where the system does not say (Linux does)."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) * KIB / 1e6
    except FileNotFoundError:
        return None


def heavy_loaded() -> list[str]:
    return [name for name in HEAVY if name in sys.modules]


def main() -> None:
    rss_before = rss_mb()
    began = time.perf_counter()
    import agentlightning

    imported = time.perf_counter()
    heavy_at_import = heavy_loaded()
    agentlightning.InMemoryLightningStore()
    used = time.perf_counter()
    rss_used = rss_mb()
    for name in agentlightning.__all__:
        getattr(agentlightning, name)
    figures = {
        "version": agentlightning.__version__,
        "import_ms": round((imported - began) * 1e3, 1),
        "first_store_ms": round((used - began) * 1e3, 1),
        "added_rss_mb": None if rss_before is None or rss_used is None else round(rss_used - rss_before, 1),
        "rss_mb": None if rss_used is None else round(rss_used, 1),
        "modules": len(sys.modules),
        "heavy_at_import": heavy_at_import,
        "heavy_of_all_names": heavy_loaded(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
