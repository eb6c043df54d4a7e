"""The engine in a process of its own: it serves, takes new weights, and goes when it should."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import psutil
import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("numpy", reason="safetensors writes through NumPy")

from agentlightning.cli import main as agl  # noqa: E402
from agentlightning.engine import weights  # noqa: E402
from agentlightning.engine.embedded import EngineServer  # noqa: E402
from agentlightning.engine.tiny.model import TinyModel, TinyShape, save_tiny  # noqa: E402
from agentlightning.engine.weights import PublishedWeights  # noqa: E402
from agentlightning.errors import ConfigurationError, EngineError  # noqa: E402
from tests import warm_python  # noqa: E402
from tests.engine.scripted import PATIENCE_SECONDS, until  # noqa: E402

HELLO: Any = [{"role": "user", "content": "37+58?"}]


def a_model(seed: int = 0) -> TinyModel:
    torch.manual_seed(seed)
    return TinyModel(TinyShape(max_length=256))


def published(model: Any) -> PublishedWeights:
    return PublishedWeights(model, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny(a_model(), path)
    return path


PRINTING = """
import sys, threading
if "agentlightning.engine.server" in " ".join(sys.orig_argv):
    real = threading.Thread.start
    def start(self):
        print("x" * 200_000, flush=True)
        real(self)
    threading.Thread.start = start
"""
"""Packages print; this is one that every Python imports."""


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[EngineServer]:
    """One for the tests that leave it as it was, but for its weights; it is started as users start it."""
    (folder.parent / "sitecustomize.py").write_text(PRINTING)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(asyncio.unix_events, "subprocess", subprocess)
        patches.syspath_prepend(str(folder.parent))
        started = EngineServer(str(folder))
        started.start()
    yield started
    started.stop()


def ask(server: EngineServer, **body: Any) -> Any:
    response = httpx.post(
        f"{server.address}/chat/completions",
        json={"messages": HELLO, **body},
        headers={"Authorization": f"Bearer {server.api_key}"},
        timeout=PATIENCE_SECONDS,
    )
    assert response.status_code == 200, response.text
    return response.json()


def test_it_serves_until_it_is_stopped_and_leaves_nothing_behind(folder: Path) -> None:
    server = EngineServer(str(folder), name="mine")
    server.start()
    pid, places = server.process_id, server._folders

    entry = server.model_config()
    given = entry["litellm_params"]
    with openai.OpenAI(base_url=given["api_base"], api_key=given["api_key"], max_retries=0) as client:
        answer = client.chat.completions.create(model="mine", messages=HELLO, max_tokens=5)
    is_running = server.is_running()
    server.stop()
    server.stop()

    assert answer.model == server.model_name == "mine"
    assert entry["model_name"] == "mine"
    assert (given["model"], given["api_base"]) == ("agl/mine", server.address)
    assert is_running
    assert not server.is_running()
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert places
    assert not any(place.exists() for place in places)


def test_published_weights_are_sampled_from(server: EngineServer) -> None:
    wishes: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "logprobs": True}
    server.publish(6, published(a_model()))
    before = ask(server, **wishes)

    server.publish(7, published(a_model(seed=1)))
    after = ask(server, **wishes)
    server.publish(8, published(a_model()))
    back = ask(server, **wishes)

    assert [answer["weights_version"] for answer in (before, after, back)] == [6, 7, 8]
    assert before["choices"][0]["logprobs"] != after["choices"][0]["logprobs"]
    assert before["choices"][0]["logprobs"] == back["choices"][0]["logprobs"]
    assert [list(folder.iterdir()) for folder in server._folders] == [[]] * len(server._folders)


def test_bad_weights_are_an_error_to_the_publisher_and_the_old_ones_stay(server: EngineServer) -> None:
    server.publish(1, published(a_model(seed=1)))
    before = ask(server, temperature=0, max_tokens=8)
    wrong = a_model()
    wrong.final_norm = torch.nn.Parameter(torch.zeros(3))

    with pytest.raises(EngineError, match="final_norm"):
        server.publish(2, published(wrong))
    with pytest.raises(EngineError, match="missing"):
        server.publish(2, published(TinyModel(TinyShape(layers=1))))

    after = ask(server, temperature=0, max_tokens=8)
    assert (after["choices"], after["weights_version"]) == (before["choices"], 1)
    assert server.status()["engine"]["weights_version"] == 1


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[Path, dict[str, Any]]:
    """The files of weights that a server has written."""
    found: dict[Path, dict[str, Any]] = {}
    write = weights.write_weights

    def noted(path: Path, tensors: Any) -> None:
        found[path] = dict(tensors)
        write(path, tensors)

    monkeypatch.setattr(weights, "write_weights", noted)
    return found


def test_weights_go_over_the_disk_where_memory_has_no_room(
    server: EngineServer, written: dict[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {str(folder): 0 for folder in server._folders[:-1]}
    real = shutil.disk_usage
    monkeypatch.setattr(
        shutil, "disk_usage", lambda place: SimpleNamespace(free=free.get(str(place), real(place).free))
    )

    server.publish(11, published(a_model()))

    assert server.status()["engine"]["weights_version"] == 11
    assert [path.parent for path in written] == [server._folders[-1]]
    assert all(not any(folder.iterdir()) for folder in server._folders)


def test_weights_travel_in_the_numbers_that_the_child_samples_with(
    server: EngineServer, written: dict[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server._served["dtype"] == "float32"
    monkeypatch.setitem(server._served, "dtype", "bfloat16")
    rounded = PublishedWeights(a_model(), seed=0, version=12)

    server.publish(12, rounded)

    [tensors] = written.values()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in rounded.tensors(torch.bfloat16))
    assert server.status()["engine"]["weights_version"] == 12


def test_its_keys_stand_in_no_command_line_and_no_environment(server: EngineServer) -> None:
    child = psutil.Process(server.process_id)

    shown = " ".join([*child.cmdline(), *child.environ().values()])

    assert server.api_key not in shown
    assert server._weights_key not in shown
    assert len({server.api_key, server._weights_key, EngineServer("tiny").api_key}) == 3


def test_what_the_child_prints_is_not_taken_for_its_address(server: EngineServer) -> None:
    """The one of this module prints far more than a pipe holds before it is ready."""
    assert server.status()["model"] == "tiny"


def test_a_child_that_was_killed_is_reported(folder: Path) -> None:
    with EngineServer(str(folder)) as server:
        assert server.process_id is not None
        os.kill(server.process_id, signal.SIGKILL)

        with pytest.raises(EngineError, match="has ended with code -9"):
            server.publish(1, published(a_model()))
        assert not server.is_running()


def test_a_child_that_cannot_begin_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"(?s)ended with code 1.*no model"):
        EngineServer(str(tmp_path / "nothing")).start()


def test_the_child_leaves_when_its_parent_is_killed(folder: Path) -> None:
    program = (
        "import sys, time\n"
        "from agentlightning.engine.embedded import EngineServer\n"
        "server = EngineServer(sys.argv[1])\n"
        "server.start()\n"
        "print(server.process_id, *server._folders, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = warm_python.TorchPopen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    number, *places = parent.stdout.readline().decode().split()
    child = psutil.Process(int(number))

    parent.kill()
    parent.wait()
    parent.stdout.close()

    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, seconds=5.0)
    assert places
    assert not any(Path(place).exists() for place in places)


def test_the_command_serves_alone_until_it_is_interrupted(folder: Path) -> None:
    command = [sys.executable, "-m", "agentlightning.cli", "serve", str(folder), "--port", "0", "--name", "own"]
    process = warm_python.TorchPopen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    words = ""
    while "Serving" not in words:
        words = process.stderr.readline()
        assert words, "it ended before it served"

    url = words.split(" at ")[1].split(". Ctrl-C")[0]
    models = httpx.get(f"{url}/models", timeout=PATIENCE_SECONDS).json()
    process.send_signal(signal.SIGINT)
    code = process.wait(PATIENCE_SECONDS)
    process.stderr.close()

    assert (models["data"][0]["id"], code) == ("own", 130)


def test_the_command_does_not_open_itself_to_other_machines_without_a_key() -> None:
    from agentlightning.cli import serve

    with pytest.raises(ConfigurationError, match="lets other machines in"):
        serve.main(["tiny", "--host", "0.0.0.0"])
    assert agl(["serve", "no/such/model", "--port", "0"]) == 1


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        (["--api-key", ""], "", "--api-key is empty"),
        (["--weights-folder", "."], "", "AGL_ENGINE_WEIGHTS_KEY"),
        (["--weights-folder", "no/such/folder"], "key", "is not a folder"),
    ],
)
def test_the_command_refuses_keys_and_folders_that_are_none(
    options: list[str], key: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentlightning.cli import serve

    monkeypatch.setenv("AGL_ENGINE_WEIGHTS_KEY", key)

    with pytest.raises(ConfigurationError, match=words):
        serve.main(["tiny", "--port", "0", *options])
