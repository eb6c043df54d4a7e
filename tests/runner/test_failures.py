"""Failures of agents: which are of one kind, what is kept of them, and how they are logged."""

import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.runner import failures
from agentlightning.runner.failures import FailureLog, FailureNote


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # whichever it is
        return caught


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        (KeyError("name"), KeyError("age"), True),
        (ValueError("row 17 is bad"), ValueError("row 18 is bad"), True),
        (ValueError("no answer from ro-1f2a"), ValueError("no answer from ro-9c3d"), True),
        (ValueError("a"), TypeError("a"), False),
        (ValueError("too long"), ValueError("too short"), False),
    ],
    ids=["quoted text", "numbers", "ids", "types", "words"],
)
def test_failures_of_one_kind_differ_in_what_varies_alone(
    one: BaseException, other: BaseException, are_alike: bool
) -> None:
    kinds = {FailureNote.of(raised(error)).kind for error in (one, other)}
    assert (len(kinds) == 1) is are_alike


def test_an_exception_that_cannot_be_shown_is_noted_all_the_same() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert FailureNote.of(raised(Unspeakable())).message == "<its text cannot be shown: RuntimeError>"


def test_failures_of_different_lines_are_of_different_kinds() -> None:
    def elsewhere() -> BaseException:
        try:
            raise ValueError("a")
        except ValueError as error:
            return error

    assert FailureNote.of(raised(ValueError("a"))).kind != FailureNote.of(elsewhere()).kind


def test_an_error_of_ours_that_the_agent_has_no_part_in_needs_no_traceback() -> None:
    code = compile("def fail(error):\n    raise error", f"{failures._PACKAGE}inside.py", "exec")
    exec(code, namespace := {"error": ConfigurationError("asks for llm")})
    with pytest.raises(ConfigurationError) as caught:
        namespace["fail"](ConfigurationError("asks for llm"))
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr] # the test's own frame

    assert "File" not in FailureNote.of(caught.value).traceback


def test_later_failures_of_a_kind_are_one_line_a_second_with_their_count(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(failures.time, "monotonic", lambda: now)
    log = FailureLog()

    for number in range(3):
        log.add(f"ro-{number}", raised(KeyError("nmae")))
    now += failures.REPEAT_SECONDS
    log.add("ro-3", raised(KeyError("nmae")))

    assert [record.getMessage() for record in caplog.records] == [
        "Rollout ro-0 failed: KeyError: 'nmae'",
        "Rollout ro-3 failed as before (4 times now): KeyError: 'nmae'",
    ]
    assert [bool(record.exc_info) for record in caplog.records] == [True, False]


def test_a_failure_reaches_handlers_of_the_user_without_commands_to_a_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, error = FailureLog(), ValueError("\x1b[31mred\n2026-01-01 [INFO] all is well")
    log.add("r", error)

    assert "red\n    2026-01-01 [INFO] all is well" in caplog.records[0].getMessage()
    assert "\x1b" not in caplog.records[0].getMessage()
