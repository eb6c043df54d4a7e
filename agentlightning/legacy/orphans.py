"""Worker processes that were left behind, found and killed with care.

Our workers end with the process that started them, so there should be none; those of earlier releases may be. A process
is killed only if it bears a worker's name, belongs to the user who asks, and is either a child of this process or an
orphan. Workers of another training that runs on the same machine are neither, and are left alone.
"""

import logging
from collections.abc import Iterable
from typing import Final

import psutil

__all__ = ["NAME_PREFIX", "kill_orphaned_processes", "orphaned_among"]

logger = logging.getLogger(__name__)

NAME_PREFIX: Final = "AgentLightning-"
"""How names of worker processes begin. Linux shows the first 15 letters of a name, which are these."""


def kill_orphaned_processes() -> None:
    """Kill the workers that were left behind by this user's trainings, and those of this process."""
    for process in orphaned_among(psutil.process_iter()):
        try:
            process.kill()  # psutil makes sure that the number does not belong to another process by now
        except psutil.Error as error:
            logger.warning("Process %d could not be killed: %s", process.pid, error)
        else:
            logger.info("Killed process %d, which was left behind.", process.pid)


def orphaned_among(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that may be killed; a process that cannot be looked at, or ends meanwhile, is none of them."""
    me = psutil.Process()
    found = []
    for process in processes:
        try:
            if _may_be_killed(process, me):
                found.append(process)
        except psutil.Error as error:
            logger.debug("Process %d is left alone: %s", process.pid, error)
    return found


def _may_be_killed(process: psutil.Process, me: psutil.Process) -> bool:
    if process == me or not process.name().startswith(NAME_PREFIX):
        return False
    if process.username() != me.username() or process.status() == psutil.STATUS_ZOMBIE:
        return False
    return process.ppid() == me.pid or _is_orphan(process)


def _is_orphan(process: psutil.Process) -> bool:
    """Whether the one who started it is gone.

    An orphan is adopted by a process of the system. A worker runs the same Python as its trainer, under the same user,
    so a parent that does not has adopted it; this holds in a container too, where the trainer may be number 1.
    """
    parent = process.parent()
    return parent is None or parent.username() != process.username() or _program_of(parent) != process.exe()


def _program_of(parent: psutil.Process) -> str | None:
    """None if it may not be known, as with processes that have more rights than their children."""
    try:
        return parent.exe()
    except psutil.AccessDenied:
        return None
