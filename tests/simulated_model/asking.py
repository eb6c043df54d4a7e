"""Ways to ask the simulated model: as an assistant, as a critic, and as an editor."""

import json
from collections.abc import Sequence
from typing import Any

import requests

from tests.simulated_model.bookings import Task
from tests.simulated_model.phrases import PHRASINGS
from tests.simulated_model.server import MODEL, SEED_PROMPT, SimulatedModel

TIMEOUT_SECONDS = 30.0

FULL_PROMPT = f"{SEED_PROMPT}\n" + "\n".join(f"- {phrasings[0]}." for phrasings in PHRASINGS.values())

CRITIQUE_REQUEST = """You optimize a prompt template. Write a critique of it as a list of changes.

# Prompt template

{prompt}

# Experiments

{experiments}
"""

EDIT_REQUEST = """Rewrite the prompt template as the critique says; keep its placeholders.

# Prompt template

{prompt}

# Critique

{critique}

# Your answer

{wish}
"""

REFLECTION_REQUEST = """I provided an assistant with the following instructions to perform a task for me:
```
{prompt}
```

The following are examples of different task inputs provided to the assistant along with the assistant's response:
```
{experiments}
```

Your task is to write a new instruction for the assistant.

Provide the new instructions within ``` blocks."""


class Asker:
    """One connection to the model."""

    def __init__(self, model: SimulatedModel) -> None:
        self.url = f"{model.url}/chat/completions"
        self.session = requests.Session()

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *error: object) -> None:
        self.session.close()

    def post(self, messages: list[dict[str, Any]], **options: Any) -> requests.Response:
        body = {"model": MODEL, "messages": messages, **options}
        return self.session.post(self.url, json=body, timeout=TIMEOUT_SECONDS)

    def say(self, text: str) -> str:
        """What the model says to a text; asks again as long as it is over its rate limit."""
        while (answered := self.post([{"role": "user", "content": text}])).status_code == 429:
            continue
        answered.raise_for_status()
        return str(answered.json()["choices"][0]["message"]["content"])

    def score(self, prompt: str, tasks: Sequence[Task]) -> float:
        """The share of the tasks that are answered right; a prompt that cannot be formatted scores nothing."""
        try:
            asked = [prompt.format(request=task.text) for task in tasks]
        except (ValueError, KeyError, IndexError):
            return 0.0
        return sum(task.score(self.say(text)) for task, text in zip(tasks, asked, strict=True)) / len(tasks)

    def experiments(self, prompt: str, tasks: Sequence[Task]) -> str:
        """The conversations about these tasks, as a critic is shown them."""
        told = []
        for task in tasks:
            asked = prompt.format(request=task.text)
            said = self.say(asked)
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            told.append({"final_reward": task.score(said), "messages": messages})
        return json.dumps(told, indent=2)

    def criticise(self, prompt: str, tasks: Sequence[Task]) -> str:
        return self.say(CRITIQUE_REQUEST.format(prompt=prompt, experiments=self.experiments(prompt, tasks)))

    def edit(self, prompt: str, critique: str, wish: str = "Output only the prompt.") -> str:
        return self.say(EDIT_REQUEST.format(prompt=prompt, critique=critique, wish=wish))
