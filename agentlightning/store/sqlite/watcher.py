"""The watcher: learns what other processes have written to the file, while somebody waits for it."""

import logging
import sqlite3
import threading
import time

from agentlightning.store.notices import NoticeBoard, NoticeFields
from agentlightning.store.sqlite.database import connect
from agentlightning.store.sqlite.writer import read_notices

__all__ = ["Watcher"]

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.05


class Watcher:
    """A thread that reads `PRAGMA data_version` every 50 ms as long as the board has waiters, and sleeps otherwise."""

    def __init__(self, path: str, board: NoticeBoard) -> None:
        self._path = path
        self._board = board
        self._wanted = threading.Event()
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # protects `_thread`
        self.earliest_due: float | None = None
        """When the watchdog must look again, as last seen in the file."""

    def watch(self) -> None:
        """Somebody is about to wait."""
        self._wanted.set()
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="agl-store-watcher", daemon=True)
                    self._thread.start()

    def stop(self) -> None:
        self._is_stopped = True
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        connection = connect(self._path, is_reader=True)
        seen = -1
        try:
            while not self._is_stopped:
                if self._board.has_waiters:
                    seen = self._look(connection, seen)
                    time.sleep(INTERVAL_SECONDS)
                else:
                    self._wanted.wait()
                    self._wanted.clear()
        finally:
            connection.close()

    def _look(self, connection: sqlite3.Connection, seen: int) -> int:
        """Publish what is new; returns the version it saw."""
        try:
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            if version != seen:
                foreign = read_notices(connection, self._board.cursor)
                (due,) = connection.execute("SELECT min(due) FROM rollouts WHERE due IS NOT NULL").fetchone()
                self._tell(foreign, due)
            return int(version)
        except sqlite3.Error as error:
            logger.warning("Cannot see what other processes write to store '%s': %s", self._path, error)
            return -1

    def _tell(self, foreign: list[NoticeFields], due: float | None) -> None:
        if foreign:
            self._board.publish(foreign)
        before, self.earliest_due = self.earliest_due, due
        if due is not None and (before is None or due < before):
            self._board.wake_everyone()
