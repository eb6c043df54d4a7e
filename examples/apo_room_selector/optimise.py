"""Optimise the prompt of the room selector with APO.

With a key in OPENAI_API_KEY it asks real models, without one the simulated model of the tests.

    optimise.py --output best.json
    optimise.py --state run.jsonl --store rooms.db      # after a kill, the same command goes on
"""

import argparse
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the simulated model lies with the tests

import openai
from room_selector import SEED_PROMPT, RoomSelector, load_requests

import agentlightning as agl
from agentlightning.algorithm.apo import APO, OptimisationBudget

TRAIN_TASKS = 40
AGENT_MODEL = "agent-model"
REAL_AGENT_MODEL = "gpt-4.1-nano"


@contextmanager
def models(offline: bool) -> Iterator[dict[str, Any]]:
    """Where the agents' model is; offline, the optimiser's models are there too."""
    if not offline:
        yield {"model": f"openai/{REAL_AGENT_MODEL}", "api_key": os.environ["OPENAI_API_KEY"]}
        return
    from tests.simulated_model.server import MODEL, SimulatedModel

    with SimulatedModel() as model:
        os.environ.update(OPENAI_BASE_URL=model.url, OPENAI_API_KEY="none-needed")
        yield {"model": f"hosted_vllm/{MODEL}", "api_base": model.url}


@contextmanager
def proxy_for(params: dict[str, Any], store: agl.LightningStore) -> Iterator[agl.LLMProxy]:
    """The proxy through which the agents call, so that their calls are recorded."""
    proxy = agl.LLMProxy(0, [{"model_name": AGENT_MODEL, "litellm_params": params}], store)
    proxy.start()
    try:
        yield proxy
    finally:  # in a thread, where the stop does not go on in the background
        stopping = threading.Thread(target=proxy.stop)
        stopping.start()
        stopping.join()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offline", action="store_true", help="use the simulated model although there is a key")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rollouts", type=int, help="spend no more than so many rollouts")
    parser.add_argument("--output", type=Path, help="write the best prompt here, as JSON")
    parser.add_argument("--state", type=Path, help="keep what is done here, to go on after a kill")
    parser.add_argument("--store", help="a SQLite file that keeps all rollouts")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    agl.setup_logging()  # a line for every candidate
    requests = load_requests()
    store = agl.InMemoryLightningStore() if options.store is None else agl.SqliteLightningStore(options.store)
    offline = options.offline or not os.environ.get("OPENAI_API_KEY")
    with models(offline) as params, proxy_for(params, store) as proxy, openai.OpenAI(api_key="any") as client:
        apo: APO[Any] = APO(
            gradient_batch_size=6,
            val_batch_size=12,
            beam_width=2,
            branch_factor=2,
            beam_rounds=options.rounds,
            budget=OptimisationBudget(rollouts=options.rollouts),
            output=options.output,
            state_file=options.state,
        )
        trainer = agl.Trainer(
            algorithm=apo,
            store=store,
            strategy=agl.SharedMemoryExecutionStrategy(n_runners=4, main_thread="algorithm"),
            initial_resources={"prompt": SEED_PROMPT, "main_llm": proxy.as_resource()},
            llm_proxy=proxy,
            name="room-selector",
        )
        trainer.fit(RoomSelector(client), requests[:TRAIN_TASKS], requests[TRAIN_TASKS:])
    print(apo.result)
    print("Ancestors of the best prompt:")
    for candidate in apo.lineage():
        scores = ", ".join(f"{score:.2f}" for score in candidate.scores.values())
        print(f"  {candidate.version:4} {candidate.fate:9} scores {scores or '-'}")


if __name__ == "__main__":
    main()
