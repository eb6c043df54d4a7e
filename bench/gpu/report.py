"""Writes the tables of docs/benchmarks/gpu.md from the figures that the scripts beside this one left.

    python bench/gpu/report.py             write the page anew
    python bench/gpu/report.py --check     end with 1 if the page is not what the figures say

A page has places `<!-- figures: NAME -->` … `<!-- end of figures -->`; what is between them is written here, the rest
by people. What was not measured says so, with the reason where a script gave one. Figures of a machine without a GPU
are rehearsals and are left out.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import results

PAGE = Path(__file__).parent.parent.parent / "docs" / "benchmarks" / "gpu.md"
PLACE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
NOT_RUN = "not run"
CALLERS = (1, 16, 64, 256)
ENGINES = ("vllm", "embedded", "generate")
SMALL, LARGE = "SmolLM2-135M", "1.5B shape"
BARS = {1: 200, 64: 5000, 256: 8000}
"""Tokens a second that the embedded engine is to make of SmolLM2-135M, by callers."""
NAMES = {"vllm": "vLLM", "embedded": "embedded engine", "generate": "`generate`", "continuous": "continuous batching"}
EXPECTED_MEMORY = (("1.5b", "all weights", None), ("7b", "adapters", None))
"""Shapes, what is trained, and no savings in particular."""
TWO_SIDED_95 = 1.96
SEEDS = (0, 1, 2)

Figure = results.Figure
Section = Callable[[Sequence[Figure]], list[str]]


# ---------------------------------------------------------------------- sections


def machine(figures: Sequence[Figure]) -> list[str]:
    """What all of this was measured on."""
    if not figures:
        return ["Nothing has been measured yet."]
    gpus = sorted({figure["gpu"] for figure in figures})
    versions: dict[str, set[str]] = {}
    for figure in figures:
        for package, version in figure["versions"].items():
            versions.setdefault(package, set()).add(version)
    packages = ", ".join(f"{package} {' and '.join(sorted(found))}" for package, found in sorted(versions.items()))
    days = sorted({figure["date"][:10] for figure in figures})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    revisions = sorted({figure["revision"] for figure in figures if figure.get("revision")})
    code = f" Code: {', '.join(revisions)}." if revisions else ""
    return [f"Measured on {' and '.join(gpus)} with {packages}, {when}.{code}"]


def speed(figures: Sequence[Figure]) -> list[str]:
    """Tokens a second by callers and engine."""
    lines: list[str] = []
    for model in (SMALL, LARGE):
        rows = [row for row in figures if row["figure"] == "speed" and row["model"] == model]
        bars = model == SMALL
        header = ["callers", *(NAMES[engine] for engine in ENGINES), *(["bar of the embedded engine"] if bars else [])]
        body = []
        for callers in CALLERS:
            cells = [_speed_of(latest(rows, engine=engine, callers=callers)) for engine in ENGINES]
            body.append([str(callers), *cells, *([_bar(rows, callers)] if bars else [])])
        lines += [f"{model}:", "", *table(header, body), ""]
        lines += reasons(rows, "engine")
    return lines


def _speed_of(row: Figure | None) -> str:
    return NOT_RUN if row is None or "tokens_per_s" not in row else f"{row['tokens_per_s']:,.0f}"


def _bar(rows: Sequence[Figure], callers: int) -> str:
    bar, row = BARS.get(callers), latest(rows, engine="embedded", callers=callers)
    if bar is None:
        return ""
    if row is None:
        return f"{bar:,}"
    return f"{bar:,}: {'met' if row['tokens_per_s'] >= bar else 'missed'}"


def step_split(figures: Sequence[Figure]) -> list[str]:
    """Seconds of one step by engine and part."""
    rows = [row for row in figures if row["figure"] == "step_split"]
    parts = ("rollouts", "learning", "publishing", "whole")
    body = []
    for model in sorted({LARGE, *(row["model"] for row in rows)}):
        for engine in ("embedded", "vllm"):
            row = latest(rows, engine=engine, model=model)
            seconds = (row or {}).get("seconds", {})
            cells = [f"{seconds[part]:.2f}" if part in seconds else NOT_RUN for part in parts]
            work = f"{row['rollouts']} x {row['tokens_per_answer']}" if seconds and row else ""
            body.append([model, NAMES[engine], work, *cells])
    header = ["model", "engine", "rollouts x tokens", "rollouts", "learning", "publishing", "whole step"]
    return [*table(header, body), "", *reasons(rows, "engine")]


def memory(figures: Sequence[Figure]) -> list[str]:
    """Peak memory of learning by shape; its seconds are not shown, for the card may have been shared."""
    rows = [row for row in figures if row["figure"] == "memory"]
    kinds = dict.fromkeys([*EXPECTED_MEMORY, *((row["shape"], row["trained"], row["savings"]) for row in rows)])
    body = []
    for shape, trained, savings in kinds:
        row = latest(rows, shape=shape, trained=trained, **({} if savings is None else {"savings": savings}))
        if savings is None and row is not None:
            continue  # it stands under the savings it was measured with
        peak = f"{row['peak_gb']:.1f}" if row is not None and "peak_gb" in row else NOT_RUN
        tokens = "" if row is None else f"{row['tokens']:,} in {row['rows']}"
        body.append([shape, trained, savings or "", tokens, peak])
    header = ["shape", "trained", "savings", "tokens in rows", "peak GB"]
    named = [{**row, "kind": f"{row['shape']}, {row['trained']}, savings {row['savings']},"} for row in rows]
    return [*table(header, body), "", *reasons(named, "kind")]


def curves(figures: Sequence[Figure]) -> list[str]:
    """Rewards before and after by engine and seed, and whether the engines differ."""
    plain = [row for row in figures if row["figure"] == "curve" and _is_plain(row)]
    body = []
    for engine in ("embedded", "vllm"):
        for seed in SEEDS:
            row = latest(plain, engine=engine, seed=seed)
            if row is None or "after" not in row:
                body.append([NAMES[engine], str(seed), *[NOT_RUN] * 5])
                continue
            low, high = row["interval"]
            reached = next((str(step) for step, reward in enumerate(row["curve"], 1) if reward >= 0.9), "none")
            rewards = [f"{row['before']:.2f}", f"{row['after']:.2f}", f"{low:.2f} to {high:.2f}"]
            body.append([NAMES[engine], str(seed), str(row["steps"]), *rewards, reached])
    header = ["engine", "seed", "steps", "before", "after", "95 % interval", "first step with a mean of 0.9"]
    return [*table(header, body), "", compared(plain), "", *reasons(plain, "engine")]


def _is_plain(row: Figure) -> bool:
    """As a user trains a published checkpoint: 16 bits, and nothing turned off."""
    published = row["dtype"] == "bfloat16" and row["rounding"] == "chance"
    return row["model"] == SMALL and published and row["importance_cap"] == "default"


def compared(rows: Sequence[Figure]) -> str:
    """The difference of the engines' final rewards, with its interval."""
    groups = {engine: _by_seed(rows, engine=engine) for engine in ("embedded", "vllm")}
    if any(len(group) < 2 for group in groups.values()):
        return f"The engines are not compared: {NOT_RUN} with two seeds or more of each."
    means = {engine: statistics.mean(row["after"] for row in group) for engine, group in groups.items()}
    half = TWO_SIDED_95 * sum(_variance(group) for group in groups.values()) ** 0.5
    difference = means["embedded"] - means["vllm"]
    low, high = difference - half, difference + half
    verdict = "the interval holds 0" if low <= 0 <= high else "the interval does not hold 0"
    return (
        f"Mean after training: embedded engine {means['embedded']:.3f}, vLLM {means['vllm']:.3f}; "
        f"difference {difference:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}: {verdict}."
    )


def _variance(rows: Sequence[Figure]) -> float:
    """Of the mean over the seeds: by the tasks within each run or by the seeds, whichever is more."""
    within = statistics.mean(((row["interval"][1] - row["interval"][0]) / 2 / TWO_SIDED_95) ** 2 for row in rows)
    return max(within, statistics.variance([row["after"] for row in rows])) / len(rows)


def rounding(figures: Sequence[Figure]) -> list[str]:
    """What the type of the checkpoint and the rounding of published weights do to learning."""
    rows = [row for row in figures if row["figure"] == "curve" and row["model"].startswith(SMALL)]
    kinds = [("bfloat16", "nearest"), ("bfloat16", "chance"), ("float32", "chance")]
    body = []
    for dtype, how in kinds:
        for engine in ("embedded", "vllm"):
            kind = {"dtype": dtype, "rounding": how, "engine": engine}
            caps = sorted({str(row["importance_cap"]) for row in rows})
            found = [_by_seed(rows, **kind, importance_cap=cap) for cap in caps]
            body += [_rounding_row(runs) for runs in found if runs]
            if not any(found):
                body.append([dtype, how, NAMES[engine], *[NOT_RUN] * 5])
    header = ["checkpoint", "rounding", "engine", "importance cap", "steps", "before", "after", "clipped at the end"]
    return [*table(header, body), "", *reasons(rows, "engine")]


def _by_seed(rows: Sequence[Figure], **wanted: Any) -> list[Figure]:
    """The last run of each seed that was measured."""
    seeds = sorted({row["seed"] for row in rows})
    found = [latest(rows, **wanted, seed=seed) for seed in seeds]
    return [row for row in found if row is not None and "after" in row]


def _rounding_row(rows: Sequence[Figure]) -> list[str]:
    """The mean over the seeds of one kind of run."""
    first = rows[0]
    steps = "/".join(sorted({str(row["steps"]) for row in rows}))
    before, after = (statistics.mean(row[name] for row in rows) for name in ("before", "after"))
    clipped = statistics.mean([row["clipped"][-1] for row in rows if row["clipped"]] or [0.0])
    seeds = f" ({len(rows)} seeds)" if len(rows) > 1 else ""
    kind = [first["dtype"], first["rounding"], NAMES[first["engine"]], first["importance_cap"]]
    return [*kind, steps, f"{before:.2f}", f"{after:.2f}{seeds}", f"{100 * clipped:.1f} %"]


def steps_per_hour(figures: Sequence[Figure]) -> list[str]:
    """The same loop in TRL and here."""
    rows = [row for row in figures if row["figure"] == "steps_per_hour"]
    body = []
    for model in sorted({SMALL, *(row["model"] for row in rows)}, reverse=True):
        for theirs, ours in (("generate", "embedded"), ("continuous", "embedded"), ("vllm", "vllm")):
            pair = [latest(rows, trainer=t, sampler=s, model=model) for t, s in (("trl", theirs), ("agl", ours))]
            rates = [(row or {}).get("steps_per_hour") for row in pair]
            cells = [NOT_RUN if rate is None else f"{rate:,.0f}" for rate in rates]
            ratio = "" if None in rates else f"{rates[1] / rates[0]:.2f}"
            work = next((f"{row['rollouts']} x {row['tokens_per_answer']}" for row in pair if row is not None), "")
            body.append([model, work, f"TRL, {NAMES[theirs]}", cells[0], f"here, {NAMES[ours]}", cells[1], ratio])
    header = [
        "model",
        "rollouts x tokens",
        "TRL",
        "steps an hour",
        "Agent Lightning",
        "steps an hour",
        "ratio (bar: 1)",
    ]
    makers = {"trl": "TRL", "agl": "Agent Lightning"}
    named = [{**row, "pair": f"{makers[row['trainer']]} with {NAMES[row['sampler']]}"} for row in rows]
    return [*table(header, body), "", *reasons(named, "pair")]


SECTIONS: dict[str, Section] = {
    section.__name__: section for section in (machine, speed, step_split, memory, curves, rounding, steps_per_hour)
}


# ---------------------------------------------------------------------- parts


def latest(rows: Sequence[Figure], **wanted: Any) -> Figure | None:
    """The last that was measured of those that match; one that was not run counts only where none was measured."""
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    measured = [row for row in found if "not_run" not in row]
    return (measured or found or [None])[-1]


def reasons(rows: Sequence[Figure], what: str) -> list[str]:
    """Why something was never run, as the scripts said, once each."""
    measured = {(row[what], row.get("model")) for row in rows if "not_run" not in row}
    missing = [row for row in rows if "not_run" in row and (row[what], row.get("model")) not in measured]
    said = {f"{NAMES.get(row[what], row[what])} was not run: {row['not_run'].rstrip('.')}." for row in missing}
    return [*sorted(said), ""] if said else []


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *body)]


def filled(page: str, figures: Sequence[Figure]) -> str:
    """The page with its tables of these figures; a place with an unknown name is an error."""
    on_gpu = [figure for figure in figures if figure["gpu"] is not None]

    def fill(place: re.Match[str]) -> str:
        lines = SECTIONS[place[2]](on_gpu)
        return "\n".join([place[1].rstrip(), "", *lines]).rstrip() + "\n\n" + place[3]

    return PLACE.sub(fill, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if the page would change")
    options = parser.parse_args()
    page = options.page.read_text(encoding="utf-8")
    written = filled(page, results.read(options.results))
    if options.check:
        return 0 if written == page else 1
    options.page.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
