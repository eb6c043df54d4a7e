"""The demo refuses what it cannot do in one sentence, and says what it leaves."""

import argparse
import tempfile
from pathlib import Path

import pytest

from agentlightning.cli import demo, main
from agentlightning.cli.demo import _left
from agentlightning.cli.demo import main as demo_command
from agentlightning.errors import ConfigurationError
from agentlightning.trainer.views import agl_command


def test_the_demo_says_that_a_seed_does_not_fix_the_number_of_steps() -> None:
    assert "different numbers of steps" in " ".join(demo_command.parser().format_help().split())


def test_the_demo_says_how_to_remove_its_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "runs.db").write_bytes(b"x" * 3_000_000)

    assert _left(tmp_path, is_temporary=True) == f"Left: 3 MB in {tmp_path}; remove it with: rm -r {tmp_path}"


def test_the_demo_does_not_offer_to_remove_what_it_did_not_write(tmp_path: Path) -> None:
    for name in ("model", "checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"x" * 2_000_000)
    (tmp_path / "thesis.txt").write_bytes(b"x" * 1_000_000)

    left = _left(tmp_path, is_temporary=False)

    assert left == f"Left: 2 MB in {tmp_path}; remove it with: rm -r {tmp_path}/checkpoints {tmp_path}/model"


def test_a_demo_that_was_stopped_early_leaves_nothing_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_at_once(arguments: argparse.Namespace, folder: Path) -> None:
        (folder / "runs.db").touch()
        raise KeyboardInterrupt

    pytest.importorskip("torch", reason="the demo trains a model")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "_trained", stop_at_once)

    assert main(["demo"]) == 130

    assert (
        capsys.readouterr().err == f"Stopped; there is no checkpoint yet, so begin again with: {agl_command()} demo\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_demo_that_cannot_begin_leaves_nothing_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: argparse.Namespace, folder: Path) -> None:
        raise ConfigurationError("The example is not here.")

    pytest.importorskip("torch", reason="the demo trains a model")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "_trained", fail)

    assert main(["demo"]) == 1

    assert list(tmp_path.iterdir()) == []
