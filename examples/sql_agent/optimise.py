"""Optimise the prompt of the SQL agent with APO.

With a key in OPENAI_API_KEY it asks real models, without one the simulated model.

    optimise.py --output best.json
    optimise.py --rounds 1 --rollouts 150      # a quick look
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the server of the simulated model lies with the tests

from langchain_openai import ChatOpenAI
from shop import SCHEMA, Question, make_database, make_questions, rounded
from sql_agent import answer, build_agent

import agentlightning as agl
from agentlightning.algorithm.apo import APO, OptimisationBudget

SEED_PROMPT = agl.PromptTemplate(
    template="Write one SQLite query that answers the question.\n\n{schema}\n\nQuestion: {question}", engine="f-string"
)
TRAIN_TASKS = 40
REAL_MODEL = "gpt-4.1-nano"


@contextmanager
def model_name(offline: bool) -> Iterator[str]:
    """The model of the agent; offline, it and the optimiser's models are served here meanwhile."""
    if not offline:
        yield REAL_MODEL
        return
    from simulated_model import SimulatedModel

    from tests.stub_model.script import Script
    from tests.stub_model.server import running

    with running(Script(SimulatedModel().react), models=("simulated", "gpt-5-mini", "gpt-4.1-mini")) as served:
        os.environ.update(OPENAI_BASE_URL=served.openai_url, OPENAI_API_KEY="none-needed")
        yield "simulated"


def rollout_of(agent: Any) -> Any:
    """The agent as something that can be optimised: it takes a prompt, and its answers are graded."""

    @agl.rollout
    def answer_question(task: Question, prompt_template: agl.PromptTemplate) -> float:
        rows = answer(agent, prompt_template.format(schema=SCHEMA, question=task["question"]))
        given = None if rows is None else rounded(rows)
        agl.emit_message(f"The answer is {given}, and {task['answer']} is right.")
        return float(given == task["answer"])

    return answer_question


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offline", action="store_true", help="use the simulated model although there is a key")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, help="spend no more than so many rollouts")
    parser.add_argument("--output", type=Path, help="write the best prompt here, as JSON")
    parser.add_argument("--store", default="memory", help="where runs are kept, such as sqlite:///sql_agent.db")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    agl.setup_logging()  # a line for every candidate
    apo: APO[Question] = APO(
        gradient_batch_size=6,
        beam_width=2,
        branch_factor=2,
        beam_rounds=options.rounds,
        budget=OptimisationBudget(rollouts=options.rollouts),
        output=options.output,
    )
    trainer = agl.Trainer(
        algorithm=apo,
        store=options.store,
        strategy=agl.SharedMemoryExecutionStrategy(n_runners=4, main_thread="algorithm"),
        initial_resources={"prompt": SEED_PROMPT},
        name="sql-agent",
    )
    offline = options.offline or not os.environ.get("OPENAI_API_KEY")
    with tempfile.TemporaryDirectory() as folder, model_name(offline) as model:
        path = Path(folder) / "shop.db"
        make_database(path)
        questions = make_questions(path)
        agent = build_agent(ChatOpenAI(model=model), path)
        trainer.fit(rollout_of(agent), questions[:TRAIN_TASKS], questions[TRAIN_TASKS:])
    print(apo.result)


if __name__ == "__main__":
    main()
