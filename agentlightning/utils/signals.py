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
    """The first of these signals, to be awaited within the block; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        for other in numbers:
            loop.remove_signal_handler(other)
        if not received.done():  # the loop may be ending already
            received.set_result(number)

    for number in numbers:
        loop.add_signal_handler(number, note, number)
    try:
        yield received
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
