"""Rules for learning: rewards that do not differ, a model that does not change, or changes for the worse."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from agentlightning.algorithm.sentinel import DISTINCT, LENGTH, TRAINED, WATCHED, WATCHED_ERROR, alarms_of
from agentlightning.events.advice import weakest_agent
from agentlightning.utils.clipped_text import counted
from agentlightning.verdict.evidence import Evidence
from agentlightning.verdict.rollout_rules import LEAST_ROLLOUTS, MOST, Finding, go_back, more, share

NEARLY_ALL: Final = 0.9
FLAT_ENTROPY: Final = 0.02
"""Nats a token: the model chooses as good as always the same."""
RUNAWAY_ENTROPY: Final = 1.0
"""Nats a token by which entropy rises when a model falls apart."""
RUNAWAY_KL: Final = 0.5
"""Nats a token between the model before and after one step."""
FORGIVEN: Final = 4
"""Times as much one step may change a model whose reward rises all the same."""
STILL_KL: Final = 1e-7
FEW_STEPS: Final = 5
STILL_LOSS: Final = 1e-4
"""Nats a token by which the loss on examples changes when the model does not."""
COLLAPSED: Final = 0.75
"""Share of groups with one answer in which a model no longer tries anything."""
NOISY: Final = 0.2
"""Share of equal answers with unequal rewards."""


# ---------------------------------------------------------------------- rewards that do not differ


def no_variance(evidence: Evidence) -> Finding | None:
    """Rewards that are the same within nearly all groups, for one of six reasons."""
    groups = evidence.groups
    same = [group for group in groups if len({one.reward for one in group}) == 1]
    if not groups or share(len(same), len(groups)) < NEARLY_ALL:
        return None
    counted, total = sum(evidence.series("groups/same")), sum(evidence.series("groups/all"))
    if total and counted / total < NEARLY_ALL:  # a sum of weighted rewards differs where its first part does not
        return None
    values = {group[0].reward for group in same if group[0].reward is not None}
    lows, highs = evidence.series("reward/min"), evidence.series("reward/max")
    lowest, highest = min([*values, *lows]), max([*values, *highs])
    equal = [group for group in groups if len({one.answer for one in group}) == 1 and group[0].answer is not None]
    figures = {"groups": len(groups), "same": len(same), "equal_answers": len(equal), "reward": fmean(values)}
    part = f"{counted:g} of {total:g}" if total else f"{len(same)} of {len(groups)}"
    said = f"In {part} groups{'' if total else evidence.sample_words} all rewards are the same"
    if lowest < highest and {group[0].reward for group in same[: -(-len(same) * 3 // 4)]} == {highest}:
        return None  # the newest are solved, after they were not
    if share(len(equal), len(groups)) >= NEARLY_ALL and not (values == {highest} and highest >= 1):
        return _equal_answers(evidence, said, figures)
    if len(values) > 1:
        return Finding(
            "too_easy_or_too_hard",
            f"{said}: each task is either always solved or never ({fmean(values):.2f} in the mean).",
            f"Give tasks of middling difficulty, reward parts of the solution, or {more(evidence, 'group_size')}.",
            figures,
        )
    value = next(iter(values))
    if value >= 1 or (value > 0 and value == highest > lowest):
        return Finding(
            "all_right",
            f"{said} and the best there is ({value:g}): there is nothing left to learn.",
            "Give harder tasks, or a reward that tells good answers from better ones.",
            figures,
        )
    if value <= 0:
        ever = "no answer was ever right" if highest <= value else "hardly an answer was right"
        return Finding(
            "all_wrong",
            f"{said} and the worst there is ({value:g}): {ever}.",
            "Give easier tasks or examples in the prompt, reward parts of the solution, or begin with SFT.",
            figures,
        )
    return Finding(
        "constant_reward",
        f"{said}: every rollout got {value:g}, whatever it answered.",
        "Look into the reward: it does not depend on the answer.",
        figures,
    )


def _equal_answers(evidence: Evidence, said: str, figures: Mapping[str, float]) -> Finding:
    entropies = evidence.series("learner/entropy")
    said += ", because all answers of a group are the same, token by token"
    if entropies and entropies[-1] <= FLAT_ENTROPY:
        return Finding(
            "collapsed",
            f"{said}: the model collapsed to one answer (entropy {entropies[-1]:.3f}).",
            _against_collapse(evidence),
            {**figures, "entropy": entropies[-1]},
        )
    advice = (
        "Do not fix the seed, do not cache answers in the agent or its client, and sample at a temperature above 0."
    )
    if (temperature := evidence.setting("temperature")) is not None:  # agents do not choose it, nor a seed
        advice = (
            "Give tasks that the model is less sure of, and do not cache answers in the agent or its client."
            if temperature
            else "Set temperature above 0 (0 now)."
        )
    return Finding("same_answers", f"{said}.", advice, figures)


def _against_collapse(evidence: Evidence) -> str:
    return f"Lower the learning rate, {more(evidence, 'learning.entropy_coefficient')}, or {go_back(evidence)}."


def collapsed_late(evidence: Evidence) -> Finding | None:
    """One answer within nearly every group of the last steps, not of the first, and wrong in many of them."""
    everything, one_answer, right = (evidence.series(f"groups/{name}") for name in ("all", "one_answer", "all_right"))
    steps = max(2, len(everything) // 4)
    first, last = sum(everything[:steps]), sum(everything[-steps:])
    same, solved = sum(one_answer[-steps:]), sum(right[-steps:])
    if len(everything) < FEW_STEPS or not first or sum(one_answer[:steps]) / first > MOST:
        return None
    if same < COLLAPSED * last or solved > COLLAPSED * last:
        return None
    answers = Counter(group[0].answer for group in evidence.groups if len({one.answer for one in group}) == 1)
    often = f"; {max(answers.values())} of the newest {len(evidence.groups)} have the very same" if answers else ""
    return Finding(
        "collapsed",
        f"The model collapsed: in {same:g} of {last:g} groups of the last {steps} steps all answers are the same, "
        f"token by token, and only {solved:g} groups are right{often}.",
        _against_collapse(evidence),
        {"groups": last, "equal_answers": same, "right": solved},
    )


def same_rewards(evidence: Evidence) -> Finding | None:
    """Prompts that all get one reward cannot be told apart; of the seed alone nothing is said."""
    rewards = [one.reward for one in evidence.rollouts if one.reward is not None and one.has_reward]
    fates = {one["fate"] for one in evidence.optimisation.get("candidates", ())}
    if not fates - {"seed", "rejected"} or len(rewards) < 2 * LEAST_ROLLOUTS or len(set(rewards)) > 1:
        return None
    name, advice = "constant_reward", "Look into the reward: it does not depend on the answer."
    if rewards[0] <= 0:
        name, advice = "all_wrong", "Give easier tasks, or reward parts of the solution."
    elif rewards[0] >= 1:
        name, advice = "all_right", "Give harder tasks, or a reward that tells good answers from better ones."
    said = f"All {len(rewards)} rewards{evidence.sample_words} are {rewards[0]:g}, whatever the prompt."
    return Finding(name, said, advice, {"rewards": len(rewards), "reward": rewards[0]})


def noisy_reward(evidence: Evidence) -> Finding | None:
    """Equal answers to one task must get equal rewards, or there is nothing that can be learned."""
    pairs = unequal = 0
    for group in evidence.groups:
        by_answer: dict[object, list[float]] = {}
        for one in group:
            if one.answer is not None and one.reward is not None:
                by_answer.setdefault(one.answer, []).append(one.reward)
        for rewards in by_answer.values():
            pairs += len(rewards) - 1
            unequal += sum(reward != rewards[0] for reward in rewards[1:])
    if pairs < LEAST_ROLLOUTS or unequal / pairs <= NOISY:
        return None
    return Finding(
        "noisy_reward",
        f"Equal answers to the same task got different rewards in {unequal} of {pairs} cases{evidence.sample_words}.",
        "Look into the reward: it depends on chance, or on something the model does not see.",
        {"unequal": unequal, "pairs": pairs},
    )


def one_task(evidence: Evidence) -> Finding | None:
    tasks = {one.task for one in evidence.training}
    groups = {(one.step, one.group) for one in evidence.training if one.group is not None}
    if len(tasks) != 1 or len(groups) < LEAST_ROLLOUTS:
        return None
    return Finding(
        "one_task",
        f"All {len(evidence.training)} rollouts{evidence.sample_words} have the same task.",
        "Give a data set of many tasks, or the model learns this one by heart.",
        {"rollouts": len(evidence.training)},
    )


# ---------------------------------------------------------------------- learning that goes wrong


def _fell(rewards: Sequence[float]) -> bool:
    """Whether a reward lost most of what it had gained, or of what it was."""
    if len(rewards) < FEW_STEPS:
        return False
    last, peak = fmean(rewards[-3:]), max(rewards)
    return last < peak - 0.5 * max(abs(peak), abs(peak - min(rewards)))


def _rate(evidence: Evidence) -> float:
    """The highest learning rate of the run: a schedule may end at none."""
    return max(evidence.series("learner/learning_rate"), default=evidence.setting("learning.learning_rate") or 0.0)


def learning_rate_too_high(evidence: Evidence) -> Finding | None:
    entropies, rewards = evidence.series("learner/entropy"), evidence.series("reward/mean")
    changes, losses = evidence.series("learner/update_kl"), evidence.series("sft/held_out_loss")
    rate = _rate(evidence)
    now = f" ({rate:g} now)" if rate else ""
    advice = f"Lower the learning rate{now} by a factor of 3 to 10, or {more(evidence, 'learning.kl_coefficient')}."
    if losses and max(losses) > losses[0] + RUNAWAY_ENTROPY:
        return Finding(
            "learning_rate_too_high",
            f"The loss on held-out rollouts rose from {losses[0]:.2f} to {max(losses):.2f} nats a token.",
            f"Lower the learning rate{now} by a factor of 3 to 10, or make fewer epochs.",
            {"loss": max(losses), "learning_rate": rate},
        )
    if len(entropies) >= 2 and max(entropies) > entropies[0] + RUNAWAY_ENTROPY and _fell(rewards):
        return Finding(
            "learning_rate_too_high",
            f"The model fell apart: entropy rose from {entropies[0]:.2f} to {max(entropies):.2f} nats a token and the "
            f"reward fell to {fmean(rewards[-3:]):.2f} from {max(rewards):.2f}.",
            advice,
            {"entropy": max(entropies), "learning_rate": rate},
        )
    rises = bool(rewards) and (fmean(rewards[-3:]), rewards[-1]) > (fmean(rewards[:3]), rewards[0])  # of 2 steps too
    if changes and max(changes) > RUNAWAY_KL * (FORGIVEN if rises else 1):
        return Finding(
            "learning_rate_too_high",
            f"The model changed by {max(changes):.2f} nats a token in one step; 0.001 to 0.1 is usual.",
            advice,
            {"kl": max(changes), "learning_rate": rate},
        )
    if len(entropies) >= 2 and _fell(rewards) and min(entropies[-3:]) <= FLAT_ENTROPY < entropies[0]:
        return Finding(
            "collapsed",
            f"The model collapsed: entropy fell from {entropies[0]:.2f} to {entropies[-1]:.3f} nats a token, and the "
            f"reward to {fmean(rewards[-3:]):.2f} from {max(rewards):.2f}.",
            _against_collapse(evidence),
            {"entropy": entropies[-1], "learning_rate": rate},
        )
    return None


def alarmed(evidence: Evidence) -> Finding | None:
    """What a sentinel watches; a run without one has no such metrics."""
    names = (TRAINED, WATCHED, WATCHED_ERROR, LENGTH, DISTINCT)
    alarms = alarms_of({name: evidence.series(name) for name in names})
    if not alarms:
        return None
    return Finding(
        "reward_hacking" if alarms[0].name == "reward_hacking" else "ran_away",
        alarms[0].sentence,
        f"Look at rollouts with the highest reward (`agl dashboard`), close the loophole, and {go_back(evidence)}"
        + ("." if evidence.setting("sentinel.stop") else "; Sentinel(stop=True) ends a run in time."),
        {name: curve[-1] for name, curve in alarms[0].curves.items() if curve},
    )


def learning_rate_too_low(evidence: Evidence) -> Finding | None:
    changes = evidence.series("learner/update_kl")
    losses = evidence.series("sft/held_out_loss") or evidence.series("sft/loss")
    is_still = evidence.steps_learned >= FEW_STEPS and len(changes) > 1 and max(changes) <= STILL_KL
    said = f"In {evidence.steps_learned} steps the model did not change"
    if is_still:
        said += f" (at most {max(changes):.1g} nats a token in one)"
    elif len(losses) > 1 and max(losses) - min(losses) < STILL_LOSS:
        said = f"In {counted(evidence.steps_learned, 'epoch')} the loss did not change ({losses[0]:.4f} nats a token)"
    else:
        return None
    rate = _rate(evidence)
    raised = f"Raise the learning rate ({rate:g} now) by a factor of 10."
    advice = raised if rate else "Set a learning_rate above 0, or leave it out."
    return Finding("learning_rate_too_low", f"{said}.", advice, {"learning_rate": rate})


def few_steps(evidence: Evidence) -> Finding | None:
    learned = evidence.steps_learned
    if not 0 < learned < FEW_STEPS:
        return None
    is_cut_short = len(evidence.series("reward/mean")) < (evidence.setting("steps") or 0)
    return Finding(
        "few_steps",
        f"Only {counted(learned, 'step')} taught the model something.",
        ("Let it run to its end" if is_cut_short else f"Train longer ({more(evidence, 'steps')})")
        + "; tens of steps are usual.",
        {"steps": learned},
    )


def weak_agent(evidence: Evidence) -> Finding | None:
    """Of several agents with rewards of their own, the one to optimise first."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for one in evidence.training:
        for agent, values in one.rewards_by_agent.items():
            rewards[agent] += values
    found = weakest_agent({agent: values for agent, values in rewards.items() if len(values) >= LEAST_ROLLOUTS})
    if found is None:
        return None
    return Finding("weak_agent", found.sentence, found.advice, {"reward": fmean(rewards[found.about])})
