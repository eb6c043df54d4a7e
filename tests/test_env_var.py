"""A setting comes from the caller, else the environment, else the fallback."""

import pytest

from agentlightning.env_var import LightningEnvVar, resolve_bool_env_var, resolve_int_env_var, resolve_str_env_var
from agentlightning.errors import ConfigurationError

HOST = LightningEnvVar.AGL_SERVER_HOST
MANAGED = LightningEnvVar.AGL_MANAGED_STORE
PORT = LightningEnvVar.AGL_SERVER_PORT


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in LightningEnvVar:
        monkeypatch.delenv(variable.value, raising=False)


def test_members_are_named_like_their_variable() -> None:
    assert all(variable.name == variable.value == variable for variable in LightningEnvVar)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, True) for text in ("1", "true", "yes", "on", " TRUE ", "Yes\n")),
        *((text, False) for text in ("0", "false", "no", "off", " False ", "OFF")),
    ],
)
def test_words_for_yes_and_no_are_read(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv(MANAGED.value, text)
    assert resolve_bool_env_var(MANAGED, fallback=not value) is value


@pytest.mark.parametrize("text", ["maybe", "", "2"])
def test_other_words_are_rejected_with_the_accepted_ones(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(MANAGED.value, text)
    with pytest.raises(
        ConfigurationError, match="AGL_MANAGED_STORE must be one of 1, true, yes, on, 0, false, no, off"
    ):
        resolve_bool_env_var(MANAGED)


def test_false_as_override_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MANAGED.value, "true")
    assert resolve_bool_env_var(MANAGED, override=False, fallback=True) is False


def test_integer_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT.value, " 8080 ")
    assert resolve_int_env_var(PORT, fallback=4747) == 8080


def test_zero_as_override_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT.value, "8080")
    assert resolve_int_env_var(PORT, 0, 4747) == 0


def test_text_that_is_no_integer_is_rejected_as_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT.value, "http")
    with pytest.raises(ValueError, match="AGL_SERVER_PORT must be an integer; it is 'http'"):
        resolve_int_env_var(PORT)


def test_override_wins_without_reading_a_broken_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT.value, "http")
    assert resolve_int_env_var(PORT, override=1) == 1


def test_text_is_read_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST.value, " example.org ")
    assert resolve_str_env_var(HOST, fallback="localhost") == " example.org "


def test_fallback_applies_when_nothing_is_set() -> None:
    assert resolve_str_env_var(HOST, fallback="localhost") == "localhost"
    assert resolve_int_env_var(PORT, fallback=4747) == 4747
    assert resolve_bool_env_var(MANAGED, fallback=True) is True


def test_nothing_set_and_no_fallback_is_none() -> None:
    assert resolve_str_env_var(HOST) is None
    assert resolve_int_env_var(PORT) is None
    assert resolve_bool_env_var(MANAGED) is None
