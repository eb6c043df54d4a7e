"""A very small model behind a real server: OpenAI's chat completions on a free port of this machine.

It knows one thing: to look up prices and add them up. A dozen is a word it has never heard. Like vLLM with
`return_token_ids`, it says which tokens it read and which it wrote; its tokens are words.
"""

import itertools
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

END = "<end>"


class Words:
    """A vocabulary that grows; a number for each word."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def ids_of(self, text: str) -> list[int]:
        return [self._ids.setdefault(word, len(self._ids)) for word in text.split()]


def written(message: Mapping[str, Any]) -> str:
    """What the model says, or said in an earlier turn."""
    calls = [f"{call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls") or ()]
    return " ".join([message.get("content") or "", *calls, END])


def prompt_of(messages: list[dict[str, Any]]) -> str:
    """A conversation as the model reads it; its own words stand there as it wrote them."""
    return " ".join([f"<{message['role']}> {written(message)}" for message in messages]) + " <assistant>"


def reply_to(messages: list[dict[str, Any]], numbers: Iterator[int]) -> dict[str, Any]:
    """Look up what has no price yet; then add up."""
    question = next(message["content"] for message in messages if message["role"] == "user")
    wanted = [(int(count), fruit) for count, fruit in re.findall(r"(\d+) (apple|pear|melon|plum)", question)]
    prices = [int(message["content"]) for message in messages if message["role"] == "tool"]
    if not wanted:
        return {"role": "assistant", "content": "It costs 1."}
    if not prices:
        calls = [
            {
                "id": f"call-{next(numbers)}",
                "type": "function",
                "function": {"name": "price", "arguments": json.dumps({"fruit": fruit})},
            }
            for _, fruit in wanted
        ]
        return {"role": "assistant", "content": None, "tool_calls": calls}
    total = sum(count * each for (count, _), each in zip(wanted, prices, strict=True))
    return {"role": "assistant", "content": f"It costs {total}."}


def completion(request: Mapping[str, Any], words: Words, numbers: Iterator[int]) -> dict[str, Any]:
    """The answer to one request, in the shape of OpenAI's API, with token ids besides."""
    message = reply_to(request["messages"], numbers)
    prompt_ids, response_ids = words.ids_of(prompt_of(request["messages"])), words.ids_of(written(message))
    return {
        "id": f"chatcmpl-{next(numbers)}",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "prompt_token_ids": prompt_ids,
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
                "token_ids": response_ids,
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(response_ids),
            "total_tokens": len(prompt_ids) + len(response_ids),
        },
    }


@contextmanager
def serve() -> Iterator[str]:
    """The address to use as OPENAI_BASE_URL, while the model is there."""
    words, numbers = Words(), itertools.count(1)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that http.server calls
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps(completion(request, words, numbers)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Quietly."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()
