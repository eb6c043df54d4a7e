"""Files with prompts, answers and keys in them: new ones are readable by their owner alone, whatever the umask says.

`AGL_FILE_MODE` gives them another mode, for volumes that several accounts share. A file that exists keeps its mode. A
new file is created where there was nothing, so that nobody can plant a link that leads the writing elsewhere.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import AgentLightningError, ConfigurationError

_READABLE_AND_WRITABLE: Final = 0o666
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def file_mode() -> int:
    """The mode of new files."""
    text = resolve_str_env_var(LightningEnvVar.AGL_FILE_MODE, fallback="0600")
    try:
        mode = int(text, 8)
    except ValueError:
        mode = 0
    if mode & 0o600 != 0o600 or mode & ~_READABLE_AND_WRITABLE:
        raise ConfigurationError(
            f"{LightningEnvVar.AGL_FILE_MODE.value} is {text!r}; give the mode of a file that its owner may read and "
            "write, in octal digits, such as 0600 or 0640."
        )
    return mode


def create_file(path: str | Path, flags: int = os.O_RDWR) -> int:
    """The descriptor of a new file; `FileExistsError` if there is one, or a link."""
    mode = file_mode()
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), mode)
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, mode)  # the umask may have taken away more
    return descriptor


def append_to(path: Path) -> BinaryIO:
    """A file opened at its end, created if there is none."""
    try:
        return os.fdopen(create_file(path, os.O_WRONLY | os.O_APPEND), "ab")
    except FileExistsError:
        return path.open("ab")


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends; if the block raises, nothing has changed.

    It is written as `path.part`. What an earlier writer left under that name is removed; a link is refused.
    """
    part = path.with_name(path.name + ".part")
    if part.is_symlink():
        raise ConfigurationError(f"'{part}' is a link, and may lead anywhere; remove it, or give another path.")
    part.unlink(missing_ok=True)
    try:
        with open(part, "wb", opener=lambda name, _flags: create_file(name)) as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def path_errors(path: Path) -> Iterator[None]:
    """Raise what the system says of a path that the user gave as one of our errors."""
    try:
        yield
    except OSError as error:
        if isinstance(error, AgentLightningError):  # some of ours are of this kind too
            raise
        raise ConfigurationError(f"Cannot use '{path}': {error.strerror}.") from error


def check_own_folder(folder: Path) -> None:
    """Refuse a folder in which another account could put files, or replace ours."""
    if not hasattr(os, "geteuid"):  # no accounts of this kind
        return
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise ConfigurationError(
            f"Folder '{folder}' belongs to the account {found.st_uid}, not to {os.geteuid()}; name one of your own."
        )
    if found.st_mode & _OTHERS_WRITE:
        raise ConfigurationError(
            f"Other accounts may write to folder '{folder}' (mode {stat.S_IMODE(found.st_mode):04o}); "
            f"run `chmod go-w {folder}`, or name another folder."
        )


def bring_to_disk(path: Path) -> None:
    """Return when the content of a file, or the names in a folder, would outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
