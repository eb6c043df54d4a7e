"""The child process of `EngineServer`: `python -m agentlightning.engine.process`.

It reads its settings, a line of JSON, from its standard input, since they hold keys and every user of the machine can
read command lines. It says in one line of JSON on its standard output where it serves, its troubles on its standard
error, and ends when it is told to or when its parent is gone, however the parent ended.
"""

import os
import shutil
import signal
import sys
from functools import partial

import orjson

from agentlightning.engine.hosting import Hosted, Hosting, host
from agentlightning.errors import AgentLightningError
from agentlightning.logging import setup
from agentlightning.utils.child_process import leave_with_parent

__all__ = ["main"]


def main() -> int:
    """Serve until the end; returns the exit code."""
    announcements = _own_output()
    settings = orjson.loads(sys.stdin.buffer.readline())
    parent, folders = settings.pop("parent"), settings["weights_folders"]
    setup(settings.pop("log_level"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to leave

    def remove_folders() -> None:  # the parent made them for its weights, and cannot remove them any more
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    leave_with_parent(remove_folders, is_orphaned=lambda: os.getppid() != parent)
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


if __name__ == "__main__":
    sys.exit(main())
