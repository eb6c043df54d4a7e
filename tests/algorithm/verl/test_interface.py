"""VERL as an algorithm: what it refuses, what it hands on, and its doors."""

import pkgutil
import sys

import pytest

from agentlightning.adapter import TraceToMessages
from agentlightning.algorithm.verl import VERL
from agentlightning.algorithm.verl.launch import missing_for_verl
from agentlightning.errors import ConfigurationError
from agentlightning.store import InMemoryLightningStore
from agentlightning.utils.installation import install_command
from agentlightning.verl.entrypoint import main


@pytest.fixture
def without_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("verl", "ray", "transfer_queue"):
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.usefixtures("without_verl")
class TestRefusal:
    def test_without_verl_it_says_what_to_install_and_what_it_needs(self) -> None:
        with pytest.raises(ConfigurationError) as caught:
            VERL().run([1], [2])

        assert install_command("verl") in str(caught.value)
        assert "the package verl" in str(caught.value)
        assert "GPU" in str(caught.value)
        assert "Nothing was started" in str(caught.value)

    def test_the_command_says_the_same_and_fails(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["data.seed=1", "+trainer.new=[a, b]"]) == 2
        assert install_command("verl") in capsys.readouterr().err

    def test_without_torch_that_is_missing_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        assert missing_for_verl()[-1] == "the package torch"


@pytest.mark.parametrize("override", ["seed", "=1", "a..b=1", "data.seed=[1"])
def test_a_setting_of_the_command_that_is_none_is_told(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([override]) == 2
    assert override in capsys.readouterr().err


def test_a_setting_below_a_value_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data=1", "data.seed=2"]) == 2
    assert "has a value already" in capsys.readouterr().err


def test_an_adapter_without_tokens_is_refused() -> None:
    algorithm = VERL()
    algorithm.set_store(InMemoryLightningStore())
    algorithm.set_adapter(TraceToMessages())

    with pytest.raises(ConfigurationError, match="TraceToMessages"):
        algorithm.run([1])


class TestEarlierReleases:
    @pytest.mark.parametrize("name", ["trainer_cls", "daemon_cls"])
    def test_classes_in_the_place_of_verls_are_refused_with_the_new_way(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match="agent_loop_manager_class"):
            VERL({}, **{name: object})

    @pytest.mark.parametrize("path", ["daemon.AgentModeDaemon", "trainer.AgentLightningTrainer"])
    def test_classes_that_are_gone_name_the_new_way(self, path: str) -> None:
        gone = pkgutil.resolve_name(f"agentlightning.verl.{path}")
        with pytest.raises(ConfigurationError, match=r"agl\.VERL\(config\)"):
            gone(None, tokenizer=None)


def test_the_client_is_at_the_port_of_the_configuration() -> None:
    with pytest.warns(DeprecationWarning, match="v0.1"):
        client = VERL({"agentlightning": {"port": 4321}}).get_client()
    assert client.endpoint == "http://localhost:4321"
