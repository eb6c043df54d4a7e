"""One span to JSON and from JSON, ours against the release. The runs take turns, and the best of each counts."""

from collections.abc import Mapping, Sequence

from children import Bench, Figures
from report import Figure, Outcome, Target

NAME = "span-json"
TITLE = "3. One span to JSON and back"
ROUNDS = 3
DIRECTIONS = {
    "to_json_us": ("model_dump_json", Target("at least", 3)),
    "from_json_us": ("model_validate_json", Target("at least", 5)),
}


def measure(bench: Bench) -> Outcome:
    cases = {"ours": (bench.ours, "span_json.py")}
    if bench.baseline is not None:
        cases["release"] = (bench.baseline, "span_json.py")
    runs = bench.alternate(cases, 1 if bench.is_quick else ROUNDS)
    figures = []
    for key, (name, target) in DIRECTIONS.items():
        times = {who: best(runs, who, key) for who in runs}
        figures += [Figure(f"{name}, {who}", taken, "us") for who, taken in times.items()]
        ratio = times["release"] / times["ours"] if "release" in times else None
        figures.append(Figure(f"{name}, release / ours", ratio, "x", target))
    return Outcome(figures, runs)


def best(runs: Mapping[str, Sequence[Figures]], who: str, key: str) -> float:
    return float(min(run[key] for run in runs[who]))
