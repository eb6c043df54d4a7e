"""The child process of `EngineServer`: `python -m agentlightning.engine.process`.

It reads its settings, a line of JSON, from its standard input, since they hold keys and every user of the machine can
read command lines. It says in one line of JSON on its standard output where it serves, its troubles on its standard
error, and ends when it is told to or when its parent is gone, however the parent ended.
"""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import orjson

from agentlightning.engine.hosting import Hosted, Hosting, host
from agentlightning.errors import AgentLightningError
from agentlightning.logging import setup

__all__ = ["main"]

WATCH_SECONDS: Final = 0.5
"""Between two looks at the parent."""


def main() -> int:
    """Serve until the end; returns the exit code."""
    announcements = _own_output()
    settings = orjson.loads(sys.stdin.buffer.readline())
    parent, folders = settings.pop("parent"), settings["weights_folders"]
    setup(settings.pop("log_level"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal signals the whole group; the parent says when to leave
    threading.Thread(target=_leave_after, args=(parent, folders), name="agl-parent-watch", daemon=True).start()
    try:
        host(Hosting(**settings), on_ready=partial(_announce, announcements), heeds_interrupt=False)
    except AgentLightningError as error:
        print(error, file=sys.stderr)  # noqa: T201 # to the parent, which tells it on
        return 1
    return 0


def _own_output() -> int:
    """Standard output, for us alone; what else is printed goes to standard error, of which the parent reads all."""
    own = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own


def _announce(to: int, hosted: Hosted) -> None:
    os.write(to, orjson.dumps(hosted) + b"\n")
    os.close(to)


def _leave_after(parent: int, folders: Sequence[str]) -> None:
    """End with the parent, and remove the folders it gave its weights in, since it cannot do so any more."""
    # The parent's id, and not the end of a pipe: a pipe is inherited by what else the parent forks, and stays open.
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
