"""What a finding is, and the rules for rollouts: those that do not run, and those that there is nothing to learn from.

A rule looks at the evidence and returns a finding, with the figure that shows it and what to try, or None. Advice that
names a setting names the value that the run had.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from agentlightning.verdict.evidence import Evidence, RolloutEvidence

MOST: Final = 0.5
"""Above this share something is the cause of a failed training; above `NOTABLE` it is worth a word."""
NOTABLE: Final = 0.1
CUT_OFF: Final = 0.3
"""Share of answers cut off at the token limit from which on training suffers."""
LEAST_ROLLOUTS: Final = 4
"""Fewer say nothing."""
QUOTING: Final = "most often with: "


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, the figures that show it, and what to try."""

    name: str
    sentence: str
    advice: str
    figures: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.sentence} {self.advice}"


Rule = Callable[[Evidence], Finding | None]


def _is_notable(count: int, total: int) -> bool:
    """Whether so many of all are worth a word: a tenth, or all of a few."""
    return share(count, total) > NOTABLE and (total >= LEAST_ROLLOUTS or count == total)


def more(evidence: Evidence, path: str) -> str:
    """Advice to raise a setting, with its value of now, or to set one that is not set."""
    name, value = path.rpartition(".")[2], evidence.setting(path)
    return f"raise {name} ({value:g} now)" if isinstance(value, (int, float)) and value else f"set {name}"


def go_back(evidence: Evidence) -> str:
    has_none = evidence.setting("steps") is not None and evidence.setting("checkpoints") is None
    return "keep checkpoints (checkpoints='folder') to go back to" if has_none else "go back to an earlier checkpoint"


def share(count: int, total: int) -> float:
    return count / total if total else 0.0


def _most_frequent(texts: Iterable[str | None]) -> str:
    counts = Counter(text.rstrip(".") for text in texts if text)
    return f"{counts.most_common(1)[0][0]}." if counts else "no reason was recorded."


# ---------------------------------------------------------------------- rollouts that do not run


def nothing_ran(evidence: Evidence) -> Finding | None:
    """No rollout, or, of an algorithm that reports nothing and has not waited, a part of them."""
    done, waiting = len(evidence.rollouts), evidence.waiting
    is_early = evidence.run.status in ("running", "stopped") and not waiting  # it has not come to that
    is_enough = done and (evidence.run.status != "succeeded" or not _is_notable(waiting, waiting + done))
    if evidence.points or is_early or is_enough:
        return None
    said = f"{waiting} rollouts wait in the queue" if waiting else "no rollout was sent"
    advice = (
        "Start runners (n_runners of the Trainer, or `agl runner`), or let the algorithm wait for its rollouts."
        if waiting
        else "See that the data set is not empty, and that an algorithm of your own enqueues rollouts and waits for "
        "them (`store.wait_for_rollouts`)."
    )
    finished = f"Only {done} of {waiting + done} rollouts were" if done else "No rollout was"
    return Finding("nothing_ran", f"{finished} finished: {said}.", advice, {"waiting": waiting})


def failed(evidence: Evidence) -> Finding | None:
    failed = [one for one in evidence.rollouts if one.status == "failed"]
    if not _is_notable(len(failed), len(evidence.rollouts)):
        return None
    said = f"{len(failed)} of {len(evidence.rollouts)} rollouts{evidence.sample_words}"
    figures = {"failed": len(failed), "rollouts": len(evidence.rollouts)}
    status = Counter(one.attempt_status for one in failed).most_common(1)[0][0]
    if status == "timeout":
        return Finding(
            "timeout",
            f"{said} ran out of time.",
            f"Let attempts take longer ({more(evidence, 'rollout_timeout')}), or find what the agent waits for "
            "(`agl why STORE ROLLOUT`).",
            figures,
        )
    if status == "unresponsive":
        return Finding(
            "lost_workers",
            f"{said} lost the worker that ran them.",
            "Look for runners that were killed (memory is the usual reason), and run fewer at once.",
            figures,
        )
    return Finding(
        "failed",
        f"{said} failed, {QUOTING}{_most_frequent(one.error for one in failed)}",
        "Mend the agent first: `trainer.dev(agent, tasks)` shows the traceback; failed rollouts teach nothing.",
        figures,
    )


def model_calls_failed(evidence: Evidence) -> Finding | None:
    failed = sum(one.calls_failed for one in evidence.rollouts)
    calls = failed + sum(one.calls for one in evidence.rollouts)
    if share(failed, calls) <= NOTABLE:
        return None
    return Finding(
        "model_calls_failed",
        f"{failed} of {calls} model calls{evidence.sample_words} failed, {QUOTING}"
        f"{_most_frequent(one.call_error for one in evidence.rollouts)}",
        "Look at the backend's own log; limits of rate or context and a wrong model name are the usual reasons.",
        {"failed": failed, "calls": calls},
    )


# ---------------------------------------------------------------------- nothing to learn from


def _succeeded(evidence: Evidence) -> list[RolloutEvidence]:
    return [one for one in evidence.training if one.status == "succeeded"]


def no_reward(evidence: Evidence) -> Finding | None:
    done = _succeeded(evidence)
    without = [one for one in done if one.reward is None]
    if not _is_notable(len(without), len(done)):
        return None
    return Finding(
        "no_reward",
        f"{len(without)} of {len(done)} rollouts that succeeded{evidence.sample_words} left no reward in the store.",
        "Return a number from the agent, or call `agl.emit_reward(...)` before it returns.",
        {"without": len(without), "rollouts": len(done)},
    )


def bad_reward(evidence: Evidence) -> Finding | None:
    done = [one for one in evidence.training if one.reward is not None]
    bad = [one for one in done if not one.has_reward]
    counted = sum(evidence.series("skipped/bad_reward"))
    if not (bad or counted):
        return None
    return Finding(
        "bad_reward",
        f"{max(len(bad), int(counted))} rewards are not finite numbers.",
        "Look for a division by zero or a logarithm of zero in the reward.",
        {"bad": max(len(bad), int(counted))},
    )


def no_model_calls(evidence: Evidence) -> Finding | None:
    done = _succeeded(evidence)
    silent, total = sum(one.calls == 0 and one.calls_failed == 0 for one in done), len(done)
    where, advice = f"rollouts{evidence.sample_words} no model call was recorded", ""
    if share(silent, total) <= MOST:  # calls of another model, or of agents that are not trained, do not count
        silent = int(sum(evidence.series("skipped/empty_trace")) + sum(evidence.series("skipped/no_tokens")))
        total = int(sum(evidence.series("rollouts/all")))
        silent = total if silent and not sum(evidence.series("samples/all")) else silent
        matched = evidence.setting("agent_match")
        where = "rollouts there was no call to train"
        advice = "" if matched is None else f"See that agent_match ({matched!r}) is the name of an agent. "
    if not evidence.is_training or total < LEAST_ROLLOUTS or share(silent, total) <= MOST:
        return None
    return Finding(
        "no_model_calls",
        f"In {silent} of {total} {where}.",
        f"{advice}See that the agent calls the model by its name through a supported SDK or the endpoint of its `llm` "
        "resource, in its own process, and that it neither caches answers nor swallows an error before the call.",
        {"without": silent, "rollouts": total},
    )


def ids_missing(evidence: Evidence) -> Finding | None:
    calls = sum(one.calls for one in evidence.training)
    without = calls - sum(one.calls_with_ids for one in evidence.training)
    if not evidence.is_training or share(without, calls) <= NOTABLE:
        return None
    return Finding(
        "ids_missing",
        f"{without} of {calls} model calls{evidence.sample_words} have no token ids, so they cannot be trained.",
        "Serve the model with a backend that returns them ('hosted_vllm/...' or 'agl/...'), call it with chat "
        "completions, and keep it out of redirect_exclude.",
        {"without": without, "calls": calls},
    )


def cut_off(evidence: Evidence) -> Finding | None:
    calls = sum(one.calls_with_ids for one in evidence.training)
    cut = sum(one.calls_cut_off for one in evidence.training)
    are_used = False in (evidence.setting("sampling.skip_truncated"), evidence.setting("acceptance.skip_truncated"))
    if are_used or calls < LEAST_ROLLOUTS or share(cut, calls) <= CUT_OFF:
        return None
    where = "Acceptance" if evidence.kind == "examples" else "SampleSettings"
    return Finding(
        "cut_off",
        f"{cut} of {calls} answers{evidence.sample_words} were cut off at the token limit, and were not learned from.",
        f"Raise max_tokens in the agent, ask for shorter answers, or set {where}(skip_truncated=False).",
        {"cut_off": cut, "answers": calls},
    )


def skipped(name: str, metric: str, sentence: str, advice: Callable[[Evidence], str]) -> Rule:
    """A rule for what the algorithm left out of most steps."""

    def rule(evidence: Evidence) -> Finding | None:
        left_out, rollouts = sum(evidence.series(metric)), sum(evidence.series("rollouts/all"))
        if not rollouts or left_out / rollouts <= MOST:
            return None
        said = sentence.format(int(left_out), int(rollouts))
        return Finding(name, said, advice(evidence), {"skipped": left_out})

    return rule
