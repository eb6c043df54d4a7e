"""A room-booking agent: it asks a tool which rooms there are, chooses one, and answers with a line.

Its data set is `requests.jsonl`; its judge compares the answer with the right one. It is given two resources: the
prompt, which is to be optimised, and the model.
"""

import json
from pathlib import Path
from typing import Any, TypedDict

import openai

import agentlightning as agl

SEED_PROMPT = agl.PromptTemplate(
    template="You book meeting rooms.\n\n{request}\n\nAnswer with a line such as: Room: <name> | Start: <time>",
    engine="f-string",
)
MOST_TURNS = 3
FIND_ROOMS = {
    "type": "function",
    "function": {
        "name": "find_rooms",
        "description": "Lists the rooms of the building with their seats, their equipment and when they are busy.",
        "parameters": {
            "type": "object",
            "properties": {"people": {"type": "integer", "description": "How many will come."}},
            "required": ["people"],
        },
    },
}


class RoomRequest(TypedDict):
    """A task."""

    request: str
    rooms: list[str]
    """What the tool finds."""
    answer: str
    """The right line."""


def load_requests() -> list[RoomRequest]:
    lines = (Path(__file__).parent / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def judge(task: RoomRequest, said: str) -> float:
    """1 for the right line; by SMS it must stand alone, since every character costs."""
    lines = [line.strip() for line in said.strip().splitlines()]
    if task["request"].startswith("Request (sms)"):
        return float(lines == [task["answer"]])
    return float(task["answer"] in lines)


class RoomSelector(agl.LitAgent[RoomRequest]):
    """The agent; one client is used for all rollouts, and each rollout has an address of its own."""

    def __init__(self, client: openai.OpenAI) -> None:
        super().__init__()
        self._client = client

    def rollout(self, task: RoomRequest, resources: Any, rollout: Any) -> float:
        llm = resources["main_llm"].with_attempted_rollout(rollout)
        client = self._client.with_options(base_url=f"{llm.endpoint}/v1")
        prompt = resources["prompt"].format(request=task["request"])
        messages: list[Any] = [{"role": "user", "content": prompt}]
        for _ in range(MOST_TURNS):
            tools: Any = [FIND_ROOMS]
            reply = client.chat.completions.create(model=llm.model, messages=messages, tools=tools)
            message = reply.choices[0].message
            if not message.tool_calls:
                return judge(task, message.content or "")
            messages.append(message.model_dump(exclude_none=True))
            found = "\n".join(["Rooms:", *task["rooms"]])
            messages += [{"role": "tool", "tool_call_id": call.id, "content": found} for call in message.tool_calls]
        return 0.0
