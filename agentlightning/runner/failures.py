"""Failures of agents: what is kept of them, which of them are of one kind, and how they are logged.

Two failures are of one kind if they have the same type, were raised at the same line, and their messages differ only in
numbers, ids and quoted text. A process logs the traceback of each kind once.
"""

import logging
import os
import re
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from agentlightning.errors import AgentLightningError
from agentlightning.logging import printable, printable_lines
from agentlightning.utils.network_errors import unanswered_address
from agentlightning.utils.otel import showable

__all__ = ["FailureLog", "FailureNote", "agent_traceback"]

logger = logging.getLogger(__name__)

LONGEST_TEXT: Final = 20_000
"""Characters of a message, and of a traceback, that are kept on the attempt."""
REPEAT_SECONDS: Final = 1.0
"""Least time between two lines about failures of one kind."""
MOST_KINDS: Final = 256
"""How many kinds a log keeps apart."""
FailureKind = tuple[str, str, str]
"""Type, shape of the message, and the line that raised."""

_PACKAGE: Final = f"{Path(__file__).parents[1]}{os.sep}"
_VARIABLE_TEXT: Final = re.compile(r"'[^']*'|\"[^\"]*\"|\b(?=\w*\d)\w+\b")
_LOCATION: Final = re.compile(r'^  File "(.*)", line (\d+)', re.MULTILINE)


@dataclass(frozen=True)
class FailureNote:
    """What made an attempt fail, as it is kept on the attempt."""

    type: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> "FailureNote":
        text = "".join(traceback.format_exception(type(error), error, agent_traceback(error)))
        message = f"{showable(error)}{unanswered_address(error)}"
        return cls(type(error).__name__, message[:LONGEST_TEXT], text[-LONGEST_TEXT:])

    @classmethod
    def read(cls, metadata: Mapping[str, object] | None) -> "FailureNote | None":
        """From the metadata of an attempt; None if there is none."""
        noted = (metadata or {}).get("error")
        if not isinstance(noted, Mapping):
            return None
        texts = [str(noted.get(name) or "") for name in ("type", "message", "traceback")]
        return cls(*(printable(text, kept="\n\t") for text in texts))

    def as_metadata(self) -> dict[str, Any]:
        return {**vars(self), "time": time.time()}

    @property
    def kind(self) -> FailureKind:
        locations = _LOCATION.findall(self.traceback)
        return self.type, _VARIABLE_TEXT.sub("*", self.message), ":".join(locations[-1]) if locations else ""

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


def agent_traceback(error: BaseException) -> TracebackType | None:
    """The traceback from the agent's first frame on.

    Where the agent has no part in it, the whole one; but None for an error of ours, which says it all in its message.
    """
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        found = found.tb_next
    return found or (None if isinstance(error, AgentLightningError) else error.__traceback__)


@dataclass
class _Seen:
    count: int = 0
    logged_seconds: float = 0.0


class FailureLog:
    """Logs failed rollouts: the first of each kind with its traceback, the others in a line a second at most."""

    def __init__(self, level: int = logging.ERROR) -> None:
        self._level = level
        self._counting = threading.Lock()  # protects what was seen
        self._seen: OrderedDict[FailureKind, _Seen] = OrderedDict()

    def __reduce__(self) -> Any:
        """In another process nothing was logged yet."""
        return FailureLog, (self._level,)

    def add(self, rollout_id: str, error: BaseException) -> None:
        note = FailureNote.of(error)
        count, is_due = self._counted(note.kind, time.monotonic())
        if count == 1:
            found = agent_traceback(error)
            shown = None if found is None else (type(error), error, found)
            logger.log(self._level, "Rollout %s failed: %s", rollout_id, printable_lines(str(note)), exc_info=shown)
        elif is_due:
            text = printable_lines(str(note))
            logger.log(self._level, "Rollout %s failed as before (%d times now): %s", rollout_id, count, text)

    def _counted(self, kind: FailureKind, now: float) -> tuple[int, bool]:
        """How often there was a failure of this kind, and whether it is time for a line about it."""
        with self._counting:
            seen = self._seen.setdefault(kind, _Seen())
            self._seen.move_to_end(kind)
            if len(self._seen) > MOST_KINDS:
                self._seen.popitem(last=False)
            seen.count += 1
            is_due = now - seen.logged_seconds >= REPEAT_SECONDS
            if is_due:
                seen.logged_seconds = now
            return seen.count, is_due
