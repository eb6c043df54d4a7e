"""Records go where setup says, once, and nowhere else."""

import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from rich.logging import RichHandler

from agentlightning.errors import ConfigurationError
from agentlightning.logging import configure_logger
from agentlightning.logging import setup as setup_logging
from agentlightning.logging import setup_module as setup_module_logging

PACKAGE = "agentlightning"

State: TypeAlias = tuple[int, list[logging.Handler], bool, bool]


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    """Give every logger back as it was; loggers born in a test lose their handlers."""
    known = {id(logger): _state(logger) for logger in _loggers()}
    fresh: State = (logging.NOTSET, [], True, False)
    yield
    logging.captureWarnings(capture=False)
    for logger in _loggers():
        level, handlers, propagate, disabled = known.get(id(logger), fresh)
        for handler in [one for one in logger.handlers if one not in handlers]:
            handler.close()
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled


def _loggers() -> list[logging.Logger]:
    named = logging.root.manager.loggerDict.values()
    return [logging.root, *(logger for logger in named if isinstance(logger, logging.Logger))]


def _state(logger: logging.Logger) -> State:
    return logger.level, list(logger.handlers), logger.propagate, logger.disabled


def test_configured_logger_writes_level_process_and_name(capsys: pytest.CaptureFixture[str]) -> None:
    logger = configure_logger()

    logger.info("hello %s", "you")

    written = capsys.readouterr().err
    assert "[INFO] (Process-" in written
    assert written.endswith(" agentlightning)   hello you\n")


@pytest.mark.parametrize("level", ["debug", " DEBUG ", logging.DEBUG])
def test_levels_are_names_in_any_case_or_numbers(level: int | str) -> None:
    assert setup_module_logging(level, name="sample").level == logging.DEBUG


def test_unknown_level_is_rejected_with_the_accepted_ones() -> None:
    with pytest.raises(ConfigurationError, match="'LOUD' is unknown; use one of CRITICAL, ERROR, WARNING, INFO"):
        setup_logging("LOUD")


def test_setting_up_twice_writes_every_line_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "all.log"
    for _ in range(2):
        setup_logging(files=file, apply_to=["sample"], extra_handlers=[logging.NullHandler()])

    logging.getLogger("agentlightning.store").info("from the package")
    logging.getLogger("sample").info("from the application")

    written = capsys.readouterr().err.splitlines()
    assert len(written) == 2
    assert written == file.read_text().splitlines()


@pytest.mark.parametrize(
    ("is_terminal", "color", "kind"),
    [(True, True, RichHandler), (True, False, logging.StreamHandler), (False, True, logging.StreamHandler)],
    ids=["terminal", "plain terminal", "redirected"],
)
def test_console_is_rich_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
    color: bool,
    kind: type[logging.Handler],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    setup_logging(color=color)

    logging.getLogger(PACKAGE).warning("colourful")

    assert [type(handler) for handler in logging.getLogger(PACKAGE).handlers] == [kind]
    assert "colourful" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"submodule_levels": {"agentlightning.store": "LOUD"}}, ConfigurationError),
        ({"files": "missing/all.log"}, FileNotFoundError),
    ],
    ids=["level", "file"],
)
def test_what_cannot_be_set_up_changes_nothing(
    options: dict[str, Any], error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = _state(logging.getLogger(PACKAGE))

    with pytest.raises(error):
        setup_logging(**options)

    assert _state(logging.getLogger(PACKAGE)) == before


def test_setup_closes_the_file_of_an_earlier_setup(tmp_path: Path) -> None:
    setup_logging(console=False, files=tmp_path / "first.log")
    [first] = logging.getLogger(PACKAGE).handlers

    setup_logging(console=False)

    assert isinstance(first, logging.FileHandler)
    assert first.stream is None


def test_setup_leaves_handlers_of_the_application_open(tmp_path: Path) -> None:
    mine = logging.FileHandler(tmp_path / "mine.log")
    setup_logging(console=False, extra_handlers=[mine])

    setup_logging(console=False)

    assert mine not in logging.getLogger(PACKAGE).handlers
    assert mine.stream is not None
    mine.close()


def test_mapping_of_files_splits_the_records(tmp_path: Path) -> None:
    for _ in range(2):  # the second time changes nothing
        setup_logging(
            console=False, files={"agentlightning.store": tmp_path / "store.log", PACKAGE: str(tmp_path / "all.log")}
        )

    logging.getLogger("agentlightning.store").info("stored")
    logging.getLogger("agentlightning.runner").info("ran")

    assert [line.split()[-1] for line in (tmp_path / "store.log").read_text().splitlines()] == ["stored"]
    assert [line.split()[-1] for line in (tmp_path / "all.log").read_text().splitlines()] == ["stored", "ran"]


def test_submodule_levels_apply_to_single_loggers(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("WARNING", submodule_levels={"agentlightning.store": "DEBUG"})

    logging.getLogger("agentlightning.store").debug("kept")
    logging.getLogger("agentlightning.runner").debug("dropped")

    written = capsys.readouterr().err
    assert "kept" in written
    assert "dropped" not in written


def test_formatter_replaces_the_format_of_console_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    setup_logging(formatter=logging.Formatter("<%(message)s>"), files=tmp_path / "all.log")

    logging.getLogger(PACKAGE).info("hello")

    assert capsys.readouterr().err == (tmp_path / "all.log").read_text() == "<hello>\n"


def test_captured_warnings_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(capture_warnings=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("mind the gap", UserWarning, stacklevel=1)

    written = capsys.readouterr().err
    assert "[WARNING]" in written
    assert "mind the gap" in written


def test_other_loggers_are_silenced_on_request() -> None:
    other, child = logging.getLogger("other"), logging.getLogger("agentlightning.store")

    setup_logging()
    assert other.disabled is False
    setup_logging(disable_existing_loggers=True)
    assert (other.disabled, child.disabled) == (True, False)
    assert setup_module_logging(name="other").disabled is False


def test_propagation_reaches_the_application_on_request(caplog: pytest.LogCaptureFixture) -> None:
    setup_logging(console=False, propagate=True)

    logging.getLogger(PACKAGE).info("heard above")

    assert caplog.messages == ["heard above"]


def test_module_setup_changes_only_its_logger(capsys: pytest.CaptureFixture[str]) -> None:
    before = _state(logging.getLogger(PACKAGE))

    setup_module_logging("DEBUG", name="sample").debug("mine")

    assert "sample)   mine" in capsys.readouterr().err
    assert _state(logging.getLogger(PACKAGE)) == before


@pytest.mark.parametrize("where", ["message", "traceback"])
def test_text_of_others_is_neither_a_record_nor_a_command_to_the_terminal(where: str, tmp_path: Path) -> None:
    forged = "\x1b]0;mine\x07\x1b[31m\x9b31m\r\n2026-01-01 00:00:00,000 [INFO] (Process-1 x)   all is well\n  kept"
    setup_logging(console=False, files=tmp_path / "log")

    if where == "message":
        logging.getLogger(f"{PACKAGE}.x").error("the agent said %s", forged)
    else:
        logging.getLogger(f"{PACKAGE}.x").error("failed", exc_info=ValueError(forged))
    first, *rest = (tmp_path / "log").read_text(encoding="utf-8").split("\n")

    assert "[ERROR]" in first
    assert all(line.startswith(" ") for line in rest if line)
    assert not any(sign in first + "".join(rest) for sign in "\x1b\x07\x9b\r")
    assert "  kept" in rest
