"""How soon an agent learns: the training of `agl demo`, seed by seed, over the whole stack.

Each seed is a process of its own with everything that a training has: a SQLite store, runners in processes of their
own, the LLM proxy, the engine, and the calculator agent with the `openai` package. The held-out tasks are tried before
the first step, every few steps, and after the last, sampled as in training; the clock starts with the first step.
Without `--seed`, all seeds are run one after the other, and with `--output` the table in a page of the documentation is
written anew. `--figures` makes the table of lines that runs with `--seed` have printed, maybe on another machine.
"""

import argparse
import asyncio
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

logging.disable(logging.WARNING)

SEEDS = 10
ENOUGH = 0.90
BASE_AT_MOST = 0.05
SECONDS_AT_MOST = 90.0
VALIDATE_EVERY = 5
SEED_SECONDS = 900.0
LOOK_SECONDS = 1.0
BEGIN, END = "<!-- table of {} -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Mark:
    """One validation."""

    step: int
    began: float
    ended: float
    mean: float
    low: float
    high: float
    calls: int
    """Model calls that the engine had answered by then."""
    cpu: float
    """CPU seconds of all processes by then."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, help="run this one here, and print its figures as one JSON line")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many, from 0 on (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=3, help="in one conversation (default: %(default)s)")
    parser.add_argument("--figures", type=Path, help="a file with lines of figures, of which the table is made")
    parser.add_argument("--runners", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--output", type=Path, help="a page of the documentation whose table is written anew")
    options = parser.parse_args()
    if options.seed is not None:
        print(json.dumps(trained(options)), flush=True)
        return
    if options.figures is not None:
        found = [json.loads(line) for line in options.figures.read_text(encoding="utf-8").splitlines() if line]
    else:
        found = [of_seed(seed, options) for seed in range(options.seeds)]
    lines = table(found)
    print("\n".join(lines))
    if options.output is not None:
        write(options.output, lines, BEGIN.format(options.questions))
    sys.exit(0 if all(is_passed(figures) for figures in found) else 1)


# ---------------------------------------------------------------------- one seed


def trained(options: argparse.Namespace) -> dict[str, Any]:
    """Train with one seed in this process and those it starts."""
    import agentlightning as agl
    from agentlightning.cli import demo

    algorithm = timed(options)
    with tempfile.TemporaryDirectory(prefix="agl-learning-") as folder, Watch() as watch:
        algorithm.at_start = watch.reset
        trainer = agl.Trainer(
            algorithm=algorithm,
            store=f"sqlite:///{folder}/runs.db",
            n_runners=options.runners,
            strategy={"type": "cs", "server_port": 0},
            runner={"type": "agentlightning.LitAgentRunner", "max_concurrency": options.concurrency},
            progress="off",
        )
        trainer.fit(
            demo.example_part("calc_agent").solve_all,
            train_dataset=demo.training_tasks(options.questions, options.seed),
            val_dataset=demo.held_out_tasks(options.questions),
        )
    return figures_of(options, algorithm, watch)


def timed(options: argparse.Namespace) -> Any:
    """The demo's algorithm, with validations in between and a note of each."""
    from agentlightning.algorithm.grpo import GRPO, LearnerSettings
    from agentlightning.cli import demo

    class Timed(GRPO):
        def __init__(self) -> None:
            super().__init__(
                "tiny",
                seed=options.seed,
                tasks_per_step=demo.TASKS_PER_STEP[options.questions],
                steps=demo.MOST_STEPS[demo.ANSWERS],
                target_reward=demo.TARGET,
                temperature=demo.TEMPERATURE,
                validation_temperature=demo.TEMPERATURE,
                learning=LearnerSettings(seed=options.seed, epochs=demo.EPOCHS),
                validate_every=VALIDATE_EVERY,
                sentinel=demo.PhaseSentinel(),
            )
            self.marks: list[Mark] = []
            self.at_start: Any = None

        async def validate(self, dataset: Any) -> Any:
            began = time.monotonic()
            found = await super().validate(dataset)
            status = await asyncio.to_thread(self.policies[0].engine.status)
            self.marks.append(
                Mark(
                    self.progress.step,
                    began,
                    time.monotonic(),
                    found.mean,
                    found.low,
                    found.high,
                    int(status["engine"]["requests"]),
                    cpu_seconds(),
                )
            )
            if self.progress.step == 0:
                self.at_start()
            return found

    return Timed()


def figures_of(options: argparse.Namespace, algorithm: Any, watch: "Watch") -> dict[str, Any]:
    marks: list[Mark] = algorithm.marks
    start, after = marks[0], marks[-1]
    reached = next((mark for mark in marks[1:] if mark.mean >= ENOUGH), None)
    figures: dict[str, Any] = {
        "seed": options.seed,
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        "runners": options.runners,
        "concurrency": options.concurrency,
        "base": [start.mean, start.low, start.high],
        "after": [after.mean, after.low, after.high],
        "steps": algorithm.progress.step,
        "rollouts": algorithm.progress.rollouts,
        "calls": after.calls - start.calls,
        "seconds": round(after.ended - start.ended, 1),
        "cpu_seconds": watch.seconds(),
        "curve": [asdict(mark) for mark in marks],
    }
    if reached is not None:
        validating = sum(mark.ended - mark.began for mark in marks[1:] if mark.step <= reached.step)
        figures["step_reached"] = reached.step
        figures["seconds_reached"] = round(reached.ended - start.ended, 1)
        figures["seconds_reached_without_validation"] = round(reached.ended - start.ended - validating, 1)
        figures["calls_reached"] = reached.calls - start.calls
        figures["cpu_seconds_reached"] = round(reached.cpu - start.cpu, 1)
    return figures


def cpu_seconds() -> float:
    """Of this process and of those that it has started and that still run."""
    here = psutil.Process()
    return sum(
        times.user + times.system for times in (one.cpu_times() for one in [here, *here.children(recursive=True)])
    )


class Watch:
    """Counts the CPU seconds of this process, by thread, and of the processes it starts, by what they do."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._looking = threading.Thread(target=self._look_on, name="watch", daemon=True)
        self._latest: dict[tuple[str, int], float] = {}
        self._before: dict[tuple[str, int], float] = {}

    def __enter__(self) -> "Watch":
        self._looking.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._looking.join()

    def reset(self) -> None:
        """Count from here."""
        self._look()
        self._before = dict(self._latest)

    def seconds(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for key, value in self._latest.items():
            total[key[0]] += value - self._before.get(key, 0.0)
        return {name: round(value, 1) for name, value in total.most_common() if value >= 0.05}

    def _look_on(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        here = psutil.Process()
        for thread in here.threads():
            name = f"trainer: {kind_of(names.get(thread.id, 'native threads'))}"
            self._latest[name, thread.id] = thread.user_time + thread.system_time
        for child in here.children(recursive=True):
            try:
                words, times = " ".join(child.cmdline()), child.cpu_times()
            except psutil.Error:
                continue
            name = "engine" if "engine.server" in words else "runners"
            self._latest[name, child.pid] = times.user + times.system


def kind_of(thread: str) -> str:
    """What a thread of the trainer's process does, by its name."""
    for part, kind in (("proxy", "LLM proxy"), ("asyncio", "learning"), ("MainThread", "algorithm")):
        if part in thread:
            return kind
    return thread.rstrip("0123456789-_ ")


# ---------------------------------------------------------------------- all seeds


def of_seed(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--seed", str(seed), "--runners", str(options.runners)]
    command += ["--concurrency", str(options.concurrency), "--questions", str(options.questions)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SEED_SECONDS, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"seed {seed}: {json.dumps({key: figures[key] for key in figures if key != 'curve'})}", file=sys.stderr)
    return figures


def is_passed(figures: dict[str, Any]) -> bool:
    return bool(
        figures["base"][0] <= BASE_AT_MOST
        and figures["after"][0] >= ENOUGH
        and figures.get("seconds_reached", SECONDS_AT_MOST + 1) <= SECONDS_AT_MOST
    )


def table(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| seed | base | after | steps | calls | s to 0.90 | CPU s to it | less validations | steps to it | s in all |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        cells = [one["seed"], interval(one["base"]), interval(one["after"]), one["steps"], f"{one['calls']:,}"]
        cells += [one.get("seconds_reached", "not reached"), one.get("cpu_seconds_reached", "")]
        cells += [one.get("seconds_reached_without_validation", ""), one.get("step_reached", ""), one["seconds"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        f"{sum(map(is_passed, found))} of {len(found)} seeds meet the bar.",
        "",
        "CPU seconds from the first step to the end:",
        "",
    ]
    names = list(dict.fromkeys(name for one in found for name in one["cpu_seconds"]))
    lines += ["| where | mean of the seeds | per model call |", "| --- | ---: | ---: |"]
    calls = sum(one["calls"] for one in found)
    for name in names:
        total = sum(one["cpu_seconds"].get(name, 0.0) for one in found)
        lines.append(f"| {name} | {total / len(found):.1f} s | {1000 * total / calls:.2f} ms |")
    one = found[-1]
    machine = f"Python {one['python']}, {one['cpus']} cores, load {one['load']:.1f} at the end"
    return [*lines, "", f"{machine}; {one['runners']} runner(s) with {one['concurrency']} rollouts at once."]


def interval(found: list[float]) -> str:
    return f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"


def write(page: Path, lines: list[str], begin: str) -> None:
    """Put the table where the page has its marks."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    _, _, behind = rest.partition(END)
    if not behind:
        raise SystemExit(f"'{page}' has no place for a table: the lines '{begin}' and '{END}'.")
    page.write_text("\n".join([before + begin, *lines, END]) + behind, encoding="utf-8")


if __name__ == "__main__":
    main()
