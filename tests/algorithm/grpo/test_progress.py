"""What a run remembers, and which checkpoints it makes and goes on from."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="checkpoints need torch")

from agentlightning.algorithm.batches import FinishedRollout  # noqa: E402
from agentlightning.algorithm.comparison import estimate  # noqa: E402
from agentlightning.algorithm.grpo.checkpoints import Checkpoints  # noqa: E402 # after the check for torch
from agentlightning.algorithm.grpo.learner import Learner  # noqa: E402
from agentlightning.algorithm.grpo.policy import Policy  # noqa: E402
from agentlightning.algorithm.grpo.progress import RECENT_STEPS, TrainingProgress  # noqa: E402
from agentlightning.algorithm.grpo.settings import LearnerSettings  # noqa: E402
from agentlightning.algorithm.grpo.tasks import Curriculum  # noqa: E402
from agentlightning.types import Rollout  # noqa: E402
from tests.algorithm.grpo.small_model import SmallModel  # noqa: E402


def finished(*rewards: float | None, status: Any = "succeeded") -> list[FinishedRollout]:
    rollout = Rollout(rollout_id="ro-1", input=None, start_time=0.0, status=status)
    return [FinishedRollout(rollout, "group", [], reward) for reward in rewards]


@pytest.fixture
def policies() -> list[Policy]:
    made = [Policy(name, "tiny", LearnerSettings(), device="cpu") for name in ("planner", "solver")]
    for policy in made:
        policy.load()
    return made


def after(progress: TrainingProgress, steps: int) -> TrainingProgress:
    for _ in range(steps):
        progress.note(finished(1.0, 0.0), {}, learned=True)
    return progress


@pytest.mark.parametrize(("failed", "mean", "least"), [("skip", 0.75, 0.5), ("worst", 0.375, 0.0)])
def test_failed_rollouts_are_counted_and_are_zeros_only_where_that_is_wanted(
    failed: Any, mean: float, least: float
) -> None:
    progress, metrics = TrainingProgress(), dict[str, float]()

    progress.note(finished(1.0, 0.5) + finished(0.0, None, status="failed"), metrics, learned=True, failed=failed)

    assert (progress.rewards, progress.seen_rewards) == ([mean], [least, 1.0])
    assert (metrics["rollouts/finished"], metrics["rollouts/failed"]) == (4, 2)
    assert (metrics["reward/mean"], metrics["reward/min"], metrics["reward/max"]) == (mean, least, 1.0)
    assert 0.0 <= metrics["interval/low"] < mean < metrics["interval/high"] <= 1.0


@pytest.mark.parametrize("status", ["failed", "succeeded"])
@pytest.mark.parametrize(("failed", "is_warned"), [(1, False), (2, True)], ids=["a tenth", "more"])
def test_step_in_which_many_rollouts_failed_is_warned_of(
    caplog: pytest.LogCaptureFixture, failed: int, is_warned: bool, status: Any
) -> None:
    rollouts = finished(*[1.0] * (10 - failed)) + finished(*[None] * failed, status=status)
    TrainingProgress().note(rollouts, {}, learned=True)
    assert ("2 of 10 rollouts gave no reward and are left out" in caplog.text) == is_warned


def test_steps_without_a_lesson_are_counted_in_a_row() -> None:
    progress = TrainingProgress()
    for learned in (False, False, True, False):
        progress.note(finished(1.0), {}, learned=learned)
    assert (progress.step, progress.empty_steps) == (4, 1)


@pytest.mark.parametrize(
    ("first", "then", "is_solved"),
    [
        (finished(0.0, 1.0), finished(1.0, 1.0), True),
        (finished(0.0, 1.0), finished(1.0, 0.5), False),
        (finished(1.0, 1.0), finished(1.0, 1.0), False),
        (finished(0.0, 1.0), [], False),
        (finished(0.0, 1.0), finished(*[1.0] * 9) + finished(None, status="failed"), True),
        (finished(0.0, 1.0), finished(*[1.0] * 8) + finished(None, None, status="failed"), False),
    ],
    ids=["highest", "one below", "never lower", "no rewards", "a tenth failed", "more failed"],
)
def test_run_is_solved_when_all_rewards_are_the_highest_and_were_lower_before(
    first: list[FinishedRollout], then: list[FinishedRollout], is_solved: bool
) -> None:
    progress = TrainingProgress()
    progress.note(first, {}, learned=True)
    for _ in range(3):
        progress.note(then, {}, learned=False)

    assert progress.is_solved() == is_solved


def test_target_is_the_mean_of_the_last_steps() -> None:
    progress = TrainingProgress()
    for reward in (0.0, *[0.8] * (RECENT_STEPS - 1)):
        progress.note(finished(reward), {}, learned=True)

    assert not progress.is_target_reached(0.8)
    progress.note(finished(0.8), {}, learned=True)
    assert progress.is_target_reached(0.8)
    assert not progress.is_target_reached(None)


def test_run_goes_on_from_what_was_saved(tmp_path: Path, policies: list[Policy]) -> None:
    progress, curriculum = after(TrainingProgress(tmp_path), 3), Curriculum(list(range(10)))
    progress.baseline = estimate([0.0, 1.0])
    policies[1].version = 2
    with torch.no_grad():
        next(iter(policies[1].model.trainable().values())).add_(1.0)
    changed = {name: tensor.clone() for name, tensor in policies[1].model.state().items()}
    tasks = curriculum.take(4)  # under way: none was learned from
    progress.save(policies, curriculum.state())
    for policy in policies:
        policy.load()

    later, order = TrainingProgress(tmp_path), Curriculum(list(range(10)))
    assert later.restore(policies, order)

    assert (later.step, later.rewards, later.baseline) == (3, [0.5] * 3, progress.baseline)
    assert later.seen_rewards == [0.0, 1.0]
    assert order.take(6) == [*tasks, *curriculum.take(2)]
    assert [policy.version for policy in policies] == [0, 2]
    assert all(torch.equal(tensor, changed[name]) for name, tensor in policies[1].model.state().items())


def test_policies_go_on_from_the_newest_step_that_all_have(tmp_path: Path, policies: list[Policy]) -> None:
    progress, place = after(TrainingProgress(tmp_path), 1), Curriculum([1]).state()
    progress.save(policies, place)
    after(progress, 1).save(policies[:1], place)  # killed between the two

    later = TrainingProgress(tmp_path)

    assert later.restore(policies, Curriculum([1]))
    assert later.step == 1


def test_without_a_checkpoint_the_run_begins_anew(tmp_path: Path, policies: list[Policy]) -> None:
    progress = TrainingProgress(tmp_path / "none")
    assert not progress.restore(policies, Curriculum([1]))
    assert progress.step == 0


def test_state_in_the_middle_of_an_update_is_not_saved(tmp_path: Path, policies: list[Policy]) -> None:
    progress = after(TrainingProgress(tmp_path), 1)
    progress.is_whole = False
    progress.save(policies, Curriculum([1]).state())
    assert list(tmp_path.iterdir()) == []


def test_best_is_what_was_validated_and_is_saved_at_once(tmp_path: Path, policies: list[Policy]) -> None:
    progress, place = TrainingProgress(tmp_path), Curriculum([1]).state()
    for rewards in ([0.0, 1.0], [1.0, 1.0], [0.0, 0.0]):
        after(progress, 1).note_validation(estimate(rewards))
        assert progress.is_due(save_every=100) == (rewards != [0.0, 0.0])
        progress.save(policies, place)

    best = Checkpoints(tmp_path / "solver").best()

    assert best is not None
    assert (best.step, progress.best) == (2, 1.0)


def test_same_state_is_saved_once(tmp_path: Path, policies: list[Policy]) -> None:
    progress = after(TrainingProgress(tmp_path), 1)
    for _ in range(2):
        progress.save(policies, Curriculum([1]).state())
    assert sorted(path.name for path in (tmp_path / "planner").glob("step-*")) == ["step-000001"]


class Adapted(SmallModel):
    """Of its weights one is trained, and is merged into another in what is published, as adapters are."""

    def trainable(self) -> dict[str, Any]:
        return {"adapter": self.inner}

    def state(self) -> dict[str, Any]:
        return {"outer": (self.outer @ self.inner).detach()}

    def load_state(self, tensors: Any) -> None:
        raise AssertionError("The merged weights are not what is trained.")


def adapted(policy: Policy, model: Adapted) -> Policy:
    policy._learner = Learner(model, LearnerSettings())
    return policy


def test_adapters_go_on_as_adapters(tmp_path: Path) -> None:
    policy, other = (adapted(Policy("small", "small", LearnerSettings()), Adapted(seed)) for seed in (1, 2))
    after(progress := TrainingProgress(tmp_path), 1)
    progress.save([policy], Curriculum([1]).state())

    assert TrainingProgress(tmp_path).restore([other], Curriculum([1]))

    assert torch.equal(other.model.trainable()["adapter"], policy.model.trainable()["adapter"])
