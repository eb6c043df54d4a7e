"""The configuration of VERL, with and without OmegaConf, Hydra and verl."""

import sys
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from agentlightning.algorithm.verl import VERL, VerlConfig, compose
from agentlightning.errors import ConfigurationError

OURS = yaml.safe_load(files("agentlightning.verl").joinpath("config.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def without_omegaconf(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("omegaconf", "hydra", "verl"):
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.usefixtures("without_omegaconf")
class TestWithoutOmegaConf:
    def test_without_arguments_it_is_our_file(self) -> None:
        config = VERL().config
        assert (config.agentlightning.port, config.agentlightning.failed) == (9999, "skip")
        assert config == {name: entries for name, entries in OURS.items() if name not in ("hydra", "defaults")}

    def test_the_users_values_win_at_every_depth_and_leave_their_neighbours(self) -> None:
        config = compose({"agentlightning": {"port": 1, "trace_aggregator": {"level": "trajectory"}}})

        assert config.agentlightning.port == 1
        assert config.agentlightning.trace_aggregator.level == "trajectory"
        assert config.agentlightning.trace_aggregator.trajectory_max_prompt_length == 2048
        assert config["data"] == OURS["data"]

    def test_something_else_than_a_mapping_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="nested dictionary"):
            VERL(["data.seed=1"])  # type: ignore[arg-type]


class TestVerlConfig:
    def test_entries_are_attributes_also_within_lists_and_when_set_later(self) -> None:
        config = VerlConfig({"a": {"b": [{"c": 1}]}})
        config.d = {"e": 2}
        config["f"] = {"g": 3}
        assert (config.a.b[0].c, config["a"].b[0]["c"], config.d.e, config.f.g) == (1, 1, 2, 3)

    def test_an_unknown_attribute_says_what_there_is(self) -> None:
        with pytest.raises(AttributeError, match="no 'seed' here; there is port, level"):
            _ = VerlConfig({"port": 1, "level": 2}).seed


class TestWithHydra:
    """With the packages, and in the place of verl a folder with its defaults."""

    @pytest.fixture(autouse=True)
    def verl(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("hydra")
        folder = tmp_path / "verl" / "trainer" / "config"
        folder.mkdir(parents=True)
        (tmp_path / "verl" / "__init__.py").write_text("raise RuntimeError('verl must not be imported')")
        (folder / "ppo_trainer.yaml").write_text("data: {seed: 1, filter_overlong_prompts: true}\nnnodes: 2\n")
        monkeypatch.syspath_prepend(tmp_path)

    def test_ours_comes_over_verls_defaults_and_the_users_over_both(self) -> None:
        config = compose({"data": {"new": 5}, "nnodes": 3})

        assert (config.data.seed, config.data.filter_overlong_prompts, config.data.new) == (1, False, 5)
        assert config.nnodes == 3
        assert config["agentlightning"]["port"] == 9999
        assert not {"hydra", "defaults"} & set(config)  # type: ignore[call-overload] # it iterates over its keys

    def test_defaults_that_cannot_be_composed_are_told(self, tmp_path: Path) -> None:
        (tmp_path / "verl" / "trainer" / "config" / "ppo_trainer.yaml").unlink()
        with pytest.raises(ConfigurationError, match="ppo_trainer"):
            compose()
