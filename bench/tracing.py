"""What observing costs: emitting a reward against a bare SDK span, a steady stream of spans, and a busy agent."""

from children import Bench
from report import Figure, Outcome, Target

NAME = "tracing"
TITLE = "12. Observing an agent"
RATE = 5000
AGENT_RATE = 200
RATE_TOLERANCE = 0.02
"""The run ends when the last span is emitted, up to a tenth of a second after its time."""
ROUNDS = 3
SECONDS = 10.0
QUICK_SECONDS = 3.0
QUEUE_LIMIT = 20_000
"""Spans the delivery lets wait; see `DeliveryLimits`."""


def measure(bench: Bench) -> Outcome:
    seconds = str(QUICK_SECONDS if bench.is_quick else SECONDS)
    emit = bench.run(bench.ours, "tracing.py", "emit")
    seen = bench.run(bench.ours, "tracing.py", "seen")
    sustain = bench.run(bench.ours, "tracing.py", "sustain", "--rate", str(RATE), "--seconds", seconds)
    rounds = range(1 if bench.is_quick else ROUNDS)
    working = ("tracing.py", "agent", "--rate", str(AGENT_RATE), "--seconds", seconds)
    agents = [bench.run(bench.ours, *working) for _ in rounds]
    agent = min(agents, key=lambda run: run["slowdown_percent"])
    calls = [bench.run(bench.ours, "model_call.py") for _ in rounds]
    call = min(calls, key=lambda run: run["added_us"])
    missing = sustain["spans"] - sustain["stored"]
    figures = [
        Figure("bare SDK span", emit["bare_us"], "us", note=f"best {emit['best_bare_us']} us"),
        Figure("emit_reward", emit["ours_us"], "us", note=f"best {emit['best_ours_us']} us"),
        Figure("emit_reward / bare span", emit["ours_us"] / emit["bare_us"], "x", Target("below", 2)),
        *(
            Figure(
                f"reward in a {name} store",
                seen[f"{name}_ms"],
                "ms",
                Target("below", 50),
                f"at worst {seen[f'worst_{name}_ms']} ms",
            )
            for name in ("memory", "sqlite")
        ),
        Figure(
            "spans into SQLite",
            sustain["spans_per_s"],
            "/s",
            Target("at least", RATE * (1 - RATE_TOLERANCE)),
            f"of {RATE:,} asked for; at worst {sustain['worst_lag_s']} s late",
        ),
        Figure("spans not stored", missing, "", Target("below", 1), f"{sustain['lost']} counted as lost"),
        Figure("longest queue", sustain["peak_queue"], "", Target("below", QUEUE_LIMIT)),
        Figure("flush at the end", sustain["flush_s"], "s"),
        Figure(
            f"work lost at {AGENT_RATE} spans/s",
            agent["slowdown_percent"],
            "%",
            Target("below", 5),
            f"runs: {', '.join(str(run['slowdown_percent']) for run in agents)}; each the median of "
            f"{len(agent['slowdowns_percent'])} pairs",
        ),
    ]
    figures.append(
        Figure(
            "added to a chat call, 2,000 prompt ids",
            call["added_us"],
            "us",
            Target("below", 150),
            f"runs: {', '.join(str(run['added_us']) for run in calls)}; best: {call['plain_us']:.0f} us without",
        )
    )
    return Outcome(figures, {"emit": emit, "seen": seen, "sustain": sustain, "agents": agents, "calls": calls})
