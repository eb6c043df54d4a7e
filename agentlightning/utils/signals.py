"""The signal that ends a server: the first Ctrl-C or SIGTERM, after which it finishes what it has begun."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

__all__ = ["ENDING_SIGNALS", "ending_signal"]

ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ending_signal(
    numbers: Sequence[signal.Signals] = ENDING_SIGNALS,
) -> "Iterator[asyncio.Future[signal.Signals]]":
    """The first of these signals, to be awaited within the block.

    A second Ctrl-C ends the process at once. After a SIGTERM others change nothing: `timeout` sends two of them.
    """
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        # Blocked meanwhile: between the loop's handler and ours another SIGTERM would end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        for other in numbers:
            loop.remove_signal_handler(other)
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        if not received.done():  # the loop may be ending already
            received.set_result(number)

    for number in numbers:
        loop.add_signal_handler(number, note, number)
    try:
        yield received
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
