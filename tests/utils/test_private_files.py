"""Files for their owner alone: modes, links, folders of others."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.utils.private_files import (
    append_to,
    bring_to_disk,
    check_own_folder,
    create_file,
    replaced_file,
)


def mode_of(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):04o}"


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=lambda mask: f"umask {mask:03o}")
def any_umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("any_umask")
def test_a_new_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    os.close(create_file(tmp_path / "created"))
    append_to(tmp_path / "appended").close()
    with replaced_file(tmp_path / "replaced"):
        pass

    assert {mode_of(path) for path in tmp_path.iterdir()} == {"0600"}
    assert {path.name for path in tmp_path.iterdir()} == {"created", "appended", "replaced"}


def test_the_environment_gives_new_files_another_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_FILE_MODE", "0640")

    os.close(create_file(tmp_path / "created"))

    assert mode_of(tmp_path / "created") == "0640"


@pytest.mark.parametrize("text", ["", "rw-r-----", "0400", "0755", "9", "-600", "1640", "0"])
def test_a_senseless_mode_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("AGL_FILE_MODE", text)
    with pytest.raises(ConfigurationError, match=r"AGL_FILE_MODE is .* such as 0600 or 0640"):
        create_file("never made")


def test_a_file_that_exists_is_appended_to_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a")
    path.chmod(0o644)

    with append_to(path) as file:
        file.write(b"b")

    assert (path.read_bytes(), mode_of(path)) == (b"ab", "0644")


def test_a_link_is_not_followed_by_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(FileExistsError):
        create_file(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("is_there", [True, False], ids=["to a file", "to nothing"])
def test_a_link_in_the_place_of_the_unfinished_file_is_refused(tmp_path: Path, is_there: bool) -> None:
    victim = tmp_path / "victim"
    if is_there:
        victim.write_text("precious")
    (tmp_path / "file.part").symlink_to(victim)

    with pytest.raises(ConfigurationError, match=r"file\.part' is a link"), replaced_file(tmp_path / "file"):
        pass

    assert victim.exists() is is_there
    assert not is_there or victim.read_text() == "precious"


def test_what_a_killed_writer_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file.part").write_text("half")

    with replaced_file(tmp_path / "file") as file:
        file.write(b"whole")

    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "whole")]


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")

    with pytest.raises(ZeroDivisionError), replaced_file(tmp_path / "file"):
        raise ZeroDivisionError

    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "before")]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777], ids=lambda mode: f"{mode:04o}")
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"mode {mode:04o}.*chmod go-w"):
        check_own_folder(tmp_path)


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_folder_that_others_may_only_read_is_taken(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    check_own_folder(tmp_path)


def test_a_folder_of_another_account_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigurationError, match="belongs to the account"):
        check_own_folder(tmp_path)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_path_itself_is_brought_to_disk(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "thing"
    path.write_text("content") if kind == "file" else path.mkdir()
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))

    bring_to_disk(path)

    assert synced == [path.stat().st_ino]
