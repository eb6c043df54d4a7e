"""What is written stays written: files and folders are brought to the disk before anybody is told of them."""

import os
from pathlib import Path

__all__ = ["bring_to_disk"]


def bring_to_disk(path: Path) -> None:
    """Return when the content of a file, or the names in a folder, would outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
