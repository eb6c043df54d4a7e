"""A shop assistant, written as people write agents: OpenAI's SDK, a tool, and a loop.

It knows nothing of Agent Lightning. Like many programs it marks its steps with OpenTelemetry; without a tracer, that
does nothing.
"""

import json
from typing import Any

from openai import OpenAI
from opentelemetry import trace

INSTRUCTIONS = "You are the assistant of a shop. Look prices up before you answer."
PRICES = {"apple": 2, "pear": 3, "melon": 5, "plum": 1}
MOST_TURNS = 5
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "The price of one piece of a fruit.",
            "parameters": {"type": "object", "properties": {"fruit": {"type": "string"}}, "required": ["fruit"]},
        },
    }
]

tracer = trace.get_tracer("shop")


def price(fruit: str) -> str:
    """The tool."""
    with tracer.start_as_current_span("price"):
        return str(PRICES[fruit])


def answer(question: str) -> str:
    """Ask the model until it asks for no more tools."""
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    with tracer.start_as_current_span("shop assistant"), OpenAI() as client:
        for _ in range(MOST_TURNS):
            reply = client.chat.completions.create(model="small-model", messages=messages, tools=TOOLS)
            said = reply.choices[0].message
            if not said.tool_calls:
                return said.content or ""
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls:
                assert call.type == "function"
                result = price(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "I do not know."
