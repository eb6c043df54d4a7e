"""What a user may replace in GRPO: loss, advantage and the order of tasks; and who is told of each step."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="GRPO needs torch")

from agentlightning.algorithm.batches import FinishedRollout  # noqa: E402
from agentlightning.algorithm.grpo import LearnerSettings, SampleSettings  # noqa: E402
from agentlightning.algorithm.grpo.advantages import ComparedReward  # noqa: E402
from agentlightning.algorithm.grpo.learner import Learner  # noqa: E402
from agentlightning.algorithm.grpo.objective import ChosenTokens, clipped_loss  # noqa: E402
from agentlightning.algorithm.grpo.packing import Row  # noqa: E402
from agentlightning.algorithm.grpo.samples import batch_of  # noqa: E402
from agentlightning.algorithm.grpo.tasks import ShuffledTasks  # noqa: E402
from agentlightning.errors import ConfigurationError  # noqa: E402
from tests.algorithm.grpo.small_model import SmallModel  # noqa: E402
from tests.algorithm.grpo.test_methods import REWARDS, batch, outcome, rollouts  # noqa: E402
from tests.algorithm.grpo.training import TASKS, Asking, SharedEngine, curve, fit, grpo  # noqa: E402
from tests.algorithm.sequences import token_sequence  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def own_loss(tokens: ChosenTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A ratio of sequences, as GSPO has it, written anew."""
    ratios = tokens.sequence_means(tokens.log_ratios).exp()
    return -ratios * tokens.advantages, {"length": tokens.lengths[tokens.sequences].double()}


def own_advantage(rewards: Sequence[ComparedReward]) -> list[float]:
    """What is above the middle; shorter answers are a little better."""
    return [one.reward - 0.5 - 0.01 * sum(one.lengths) for one in rewards]


# ---------------------------------------------------------------------- loss


def test_packing_changes_nothing_for_a_loss_of_ones_own() -> None:
    found = rollouts(SmallModel(), REWARDS, spread=0.3)
    made = batch(found, SampleSettings())

    one, several = (
        Learner(SmallModel(), LearnerSettings(loss=own_loss, minibatches=1, max_batch_tokens=most)).update(
            made.samples, made.sampled
        )
        for most in (4096, 12)
    )

    assert one["learner/padded_tokens"] > several["learner/padded_tokens"]
    for name in ("learner/loss", "learner/grad_norm", "learner/length"):
        assert one[name] == pytest.approx(several[name], rel=1e-9)


def test_the_built_in_loss_as_a_function_learns_the_same() -> None:
    found = rollouts(SmallModel(), REWARDS, spread=0.3)
    made = batch(found, SampleSettings())

    built_in, own = SmallModel(), SmallModel()
    Learner(built_in, LearnerSettings()).update(made.samples, made.sampled)
    Learner(own, LearnerSettings(loss=clipped_loss)).update(made.samples, made.sampled)

    for name, weight in built_in.trainable().items():
        torch.testing.assert_close(weight, own.trainable()[name], rtol=0, atol=0)


@pytest.mark.parametrize("most", [4096, 12])
def test_the_effective_share_of_the_sample_is_that_of_its_weights(most: int) -> None:
    made = batch(rollouts(SmallModel(), REWARDS, spread=0.6), SampleSettings())
    learner = Learner(SmallModel(), LearnerSettings(importance_cap=1.2, minibatches=1, max_batch_tokens=most))
    rows = [Row.of(sample, learner.model) for sample in made.samples]
    own = {id(row): logprobs for row, logprobs in learner.evaluated(rows)}
    weights = torch.cat([(own[id(row)] - row.engine_logprobs).exp().clamp(max=1.2) for row in rows])

    metrics = learner.update(made.samples, made.sampled)

    assert metrics["learner/effective_share"] == pytest.approx(
        float(weights.sum() ** 2 / (weights.square().sum() * len(weights))), rel=1e-6
    )
    assert 0.5 < metrics["learner/effective_share"] < 0.999


def test_tokens_are_counted_by_the_age_of_their_weights() -> None:
    sequences = [
        token_sequence(([1], [2, 3]), ([4], [5]), versions=["3", "5"]),
        token_sequence(([1], [2, 3, 4]), versions=["5"]),
    ]
    made = batch_of(
        [outcome("a", float(number), sequence) for number, sequence in enumerate(sequences)],
        SampleSettings(),
        current_version=5,
    )

    figures = made.report.metrics()

    assert (figures["staleness/tokens_0"], figures["staleness/tokens_2"], figures["staleness/max"]) == (4, 2, 2)


# ---------------------------------------------------------------------- advantage


def test_an_advantage_of_ones_own_sees_groups_that_do_not_differ() -> None:
    outcomes = [
        outcome(group, 1.0, token_sequence(([1], [2] * length))) for group, length in (("a", 1), ("a", 3), ("b", 2))
    ]
    seen: list[ComparedReward] = []

    def shorter(rewards: Sequence[ComparedReward]) -> list[float]:
        seen.extend(rewards)
        return [0.0 if one.group == "b" else 2.0 - sum(one.lengths) for one in rewards]

    made = batch_of(outcomes, SampleSettings(advantage=shorter))

    assert [(one.group, one.reward, one.lengths, one.agents) for one in seen] == [
        ("a", 1.0, (1,), ("solver",)),
        ("a", 1.0, (3,), ("solver",)),
        ("b", 1.0, (2,), ("solver",)),
    ]
    assert [sample.advantage for sample in made.samples] == [1.0, -1.0]
    assert made.report.metrics()["skipped/no_variance"] == 1


def test_with_turns_an_advantage_of_ones_own_sees_returns() -> None:
    two_turns = token_sequence(([1], [2]), ([3], [4, 5]), rewards=[0.5, 1.0])
    seen: list[ComparedReward] = []

    def returns(rewards: Sequence[ComparedReward]) -> list[float]:
        seen.extend(rewards)
        return [one.reward for one in rewards]

    made = batch_of([outcome("a", 1.0, two_turns)], SampleSettings(advantage=returns, credit="turn", discount=0.5))

    assert [(one.group, one.reward, one.lengths) for one in seen] == [("a/0", 1.0, (1,)), ("a/1", 1.0, (2,))]
    assert made.samples[0].token_advantages == [0.0, 1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [([1.0], "returned 1 advantages"), ([1.0, float("nan")], "returned the advantage nan")],
    ids=["too-few", "not-finite"],
)
def test_advantages_that_are_no_numbers_for_each_reward_are_refused(returned: list[float], message: str) -> None:
    outcomes = [outcome("a", reward, token_sequence(([1], [2]))) for reward in (0.0, 1.0)]
    with pytest.raises(ConfigurationError, match=f"<lambda> {message}; return a finite number for each of the 2"):
        batch_of(outcomes, SampleSettings(advantage=lambda rewards: returned))


# ---------------------------------------------------------------------- a run


class FirstTask(ShuffledTasks):
    """The same task again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: list[dict[int, list[float | None]]] = []

    def take(self, count: int) -> Sequence[int]:
        return [0] * count

    def observe(self, finished: Mapping[int, Sequence[FinishedRollout]]) -> None:
        self.observed.append({task: [one.reward for one in own] for task, own in finished.items()})


def test_a_run_uses_what_was_replaced_and_records_it(engine: SharedEngine) -> None:
    sampler, steps = FirstTask(), list[tuple[int, float]]()

    async def told(step: int, metrics: Mapping[str, float]) -> None:
        await asyncio.sleep(0)
        steps.append((step, metrics["learner/length"]))

    agent = Asking(lambda agent, task, rollout, said: 0.25)
    algorithm = grpo(steps=2, loss=own_loss, advantage=own_advantage, tasks=sampler, on_step=told)
    made = fit(algorithm, agent)

    lengths = [point["learner/length"] for point in curve(made, "learner/length")]
    assert [step for step, _ in steps] == [1, 2]
    assert [length for _, length in steps] == lengths
    assert {task for _, task in (key.split("/", 1) for key in agent.seen)} == {TASKS[0]}
    assert sampler.observed == [{0: [0.25] * 4}] * 2
    (run,) = asyncio.run(made.store.query_runs())
    settings = run.config["settings"]["algorithm"]
    assert settings["learning"]["loss"] == f"{__name__}.own_loss"
    assert settings["sampling"]["advantage"] == f"{__name__}.own_advantage"
    assert settings["tasks"] == f"{__name__}.FirstTask"
    assert settings["on_step"].endswith("told")


def test_an_error_of_a_listener_ends_the_run(engine: SharedEngine) -> None:
    def told(step: int, metrics: Mapping[str, float]) -> Any:
        raise RuntimeError("no plot today")

    with pytest.raises(RuntimeError, match="no plot today"):
        fit(grpo(on_step=told), Asking(lambda agent, task, rollout, said: 0.25))
