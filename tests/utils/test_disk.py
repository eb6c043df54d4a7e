"""Files and folders that are brought to the disk."""

import os
from pathlib import Path

import pytest

from agentlightning.utils.disk import bring_to_disk


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_thing_itself_is_synced_and_closed_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "thing"
    if kind == "file":
        path.write_text("content")
    else:
        path.mkdir()
    synced: list[tuple[int, int]] = []

    def note(descriptor: int) -> None:
        synced.append((descriptor, os.fstat(descriptor).st_ino))

    monkeypatch.setattr(os, "fsync", note)

    bring_to_disk(path)

    ((descriptor, inode),) = synced
    assert inode == path.stat().st_ino
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        bring_to_disk(tmp_path / "nothing")
