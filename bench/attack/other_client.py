"""Another client: reads one thing again and again, at fixed times, and prints how long each answer took.

`python other_client.py URL [TOKEN]` reads until its input ends, then prints its latencies in seconds as one JSON list.
A request that is late because the one before it was answered late counts from the time at which it was due.
"""

import asyncio
import json
import sys
import time

import aiohttp

INTERVAL_SECONDS = 0.02
LATE_SECONDS = 60.0


async def read(session: aiohttp.ClientSession, url: str, due: float, latencies: list[float]) -> None:
    try:
        async with session.get(url) as response:
            await response.read()
            is_served = response.status == 200
    except (OSError, asyncio.TimeoutError, aiohttp.ClientError):
        is_served = False
    latencies.append(time.perf_counter() - due if is_served else LATE_SECONDS)


async def main(url: str, token: str | None) -> None:
    headers = None if token is None else {"Authorization": f"Bearer {token}"}
    limit = aiohttp.ClientTimeout(total=LATE_SECONDS)
    latencies: list[float] = []
    async with aiohttp.ClientSession(
        headers=headers, timeout=limit, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        await read(session, url, time.perf_counter(), [])
        print("ready", flush=True)
        ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        due, reads = time.perf_counter(), []
        while not ended.done():
            reads.append(asyncio.create_task(read(session, url, due, latencies)))
            due += INTERVAL_SECONDS
            await asyncio.sleep(max(due - time.perf_counter(), 0))
        await asyncio.gather(*reads)
    print(json.dumps(latencies))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
