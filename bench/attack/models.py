"""A backend of models that means harm: what it answers depends on the words in the request.

`python models.py PORT` serves until it is killed. The content of the first message says which answer is given: "large"
and "huge" are one message of 30 and 100 MB, "values" is 30 MB of empty lists, "endless" streams events for ever.
Anything else gets a short answer.
"""

import asyncio
import json
import sys

MEGABYTE = 1024**2
CHUNK = {"id": "1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "word " * 10}}]}


def answer(content: str) -> bytes:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    body = {"id": "1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
    return json.dumps(body).encode()


ANSWERS = {
    "large": answer("x" * (30 * MEGABYTE)),
    "huge": answer("x" * (100 * MEGABYTE)),
    "values": b'{"id":"1","choices":[' + b"[]," * (10 * MEGABYTE) + b"[]]}",
    "short": answer("Well."),
}


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
            body = await reader.readexactly(length)
            wanted = json.loads(body)["messages"][0].get("content") if length else "short"
            if wanted == "endless":
                await stream(writer)
                return
            content = ANSWERS.get(wanted, ANSWERS["short"])
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
            writer.write(b"content-length: %d\r\n\r\n" % len(content) + content)
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def stream(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    events = (b"data: " + json.dumps(CHUNK).encode() + b"\n\n") * 400
    while True:
        writer.write(b"%x\r\n" % len(events) + events + b"\r\n")
        await writer.drain()


async def main(port: int) -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
