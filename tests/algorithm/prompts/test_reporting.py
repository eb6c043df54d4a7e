"""What a user sees of an optimisation on the terminal, without configuring a log."""

from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.apo.apo import APO
from agentlightning.algorithm.gepa import GEPA
from tests.algorithm.prompts.world import SEED, WORDS, Optimiser, Writer

pytestmark = pytest.mark.usefixtures("quick_poml")
TASKS = list(range(40))


def shown_by(algorithm: Any, share: int, capsys: pytest.CaptureFixture[str], progress: Any = "plain") -> str:
    """What a training writes whose agent is right on a third of the tasks, if polite on one more in `share`."""

    @agl.prompt_rollout
    def agent(task: int, prompt_template: agl.PromptTemplate) -> float:
        is_polite = WORDS[0] in prompt_template.template
        return float(task % 3 == 0 or (is_polite and task % share == share - 1))

    trainer = agl.Trainer(
        algorithm=algorithm, strategy="shm", n_runners=2, initial_resources={"prompt": SEED}, progress=progress
    )
    trainer.fit(agent, TASKS, TASKS)
    return capsys.readouterr().err


def apo(**options: Any) -> APO[int]:
    return APO(Optimiser(), val_batch_size=8, beam_width=1, branch_factor=1, beam_rounds=1, seed=3, **options)  # type: ignore[arg-type] # a stand-in for the client


@pytest.mark.parametrize("algorithm", [apo, lambda: GEPA(Writer(), iterations=3, front_size=12)], ids=["APO", "GEPA"])
def test_a_gain_is_shown_with_its_interval_and_where_the_prompts_lie(
    algorithm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown_by(algorithm(), 1, capsys).splitlines()

    assert any(line.startswith("fit  Gained +") and "validation tasks)" in line for line in lines)
    assert any("The best prompt is v" in line for line in lines)
    assert any("-best'." in line for line in lines)


def test_a_seed_that_stays_is_shown_with_the_best_loser_and_the_tasks_that_would_decide(
    capsys: pytest.CaptureFixture[str],
) -> None:
    algorithm = apo()

    shown = shown_by(algorithm, 6, capsys)

    assert algorithm.result is not None
    loser = algorithm.result.best_loser
    assert loser is not None
    assert loser.gain.mean > 0
    assert loser.tasks_needed is not None
    assert loser.tasks_needed > len(TASKS)
    assert "fit  The seed is still the best prompt" in shown
    assert f"about {loser.tasks_needed:,} validation tasks would decide it" in shown


def test_a_quiet_training_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown_by(apo(), 1, capsys, progress="off") == ""


def test_the_log_that_is_set_up_has_the_result_once_and_no_access_lines(capsys: pytest.CaptureFixture[str]) -> None:
    agl.setup_logging()
    try:
        shown = shown_by(apo(), 1, capsys)
    finally:
        agl.setup_logging("WARNING", console=False, propagate=True)

    assert shown.count("The best prompt is v") == 1
