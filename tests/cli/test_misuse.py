"""Odd use of every command: one clear line and an exit code, no traceback, no silent wait, and nothing left behind."""

import asyncio
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli import main, stores
from agentlightning.execution import ClientServerExecutionStrategy
from agentlightning.store import InMemoryLightningStore, SqliteLightningStore
from tests.e2e.server_process import ServerProcess

AGENTS = """
import agentlightning as agl

@agl.rollout
def agent(task, llm):
    return 1.0

class Demanding(agl.LitAgent):
    def __init__(self, more):
        super().__init__()

class Short(agl.LitAgent):
    def rollout(self, task):
        return 1.0

number = 3
"""
FILES = {
    "empty": "",
    "text": "hello\n",
    "tasks.jsonl": '{"a": 1}\n',
    "torn.jsonl": '"a"\n{oh',
    "torn.json": "{",
    "torn.yaml": "a: [",
    "list.json": "[]",
    "odd.json": '{"model_list": {"a": 1}}',
    "folder/file": "",
    "misused_agents.py": AGENTS,
    "broken_agents.py": "raise RuntimeError('not today')\n",
    "unparsed_agents.py": "agent = (\n",
    "needy_agents.py": "import a_package_that_is_missing\n",
}
EVAL = ["eval", "http://127.0.0.1:1/v1", "--model", "m", "--agent", "misused_agents:agent"]
PROXY = ["proxy", "--model", "m=http://127.0.0.1:1/v1", "--port", "0"]
FIRST_ANSWER_SECONDS = 2.0


@dataclass
class Places:
    """What the arguments of the cases name."""

    other: str
    refused: str
    taken: str
    silent: str


class Another(BaseHTTPRequestHandler):
    """A server that knows nothing of stores."""

    def do_GET(self) -> None:  # the name http.server looks for
        self.send_error(404)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def places() -> Iterator[Places]:
    other = ThreadingHTTPServer(("127.0.0.1", 0), Another)
    thread = threading.Thread(target=other.serve_forever, args=(0.01,))
    thread.start()
    with socket.socket() as bound, socket.create_server(("127.0.0.1", 0)) as silent:
        bound.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        ports = [other.server_port, bound.getsockname()[1], silent.getsockname()[1]]
        addresses = [f"http://127.0.0.1:{port}" for port in ports]
        yield Places(addresses[0], addresses[1], str(other.server_port), addresses[2])
    other.shutdown()
    thread.join()
    other.server_close()


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with things of every kind."""
    folder = tmp_path_factory.mktemp("things")

    async def make_store() -> None:
        async with SqliteLightningStore(folder / "good.db") as store:
            await store.enqueue_rollout(1)

    asyncio.run(make_store())
    (folder / "folder").mkdir()
    (folder / "binary").write_bytes(bytes(range(256)) * 40)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def folder(things: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with copies of them; the environment names no token."""
    shutil.copytree(things, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("AGL_STORE_TOKEN", "AGL_PROXY_API_KEY", "PROMETHEUS_MULTIPROC_DIR", "HOSTED_VLLM_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int, str]:
    """The exit code of a command and what it writes to standard error."""
    try:
        code: Any = main(arguments)
    except SystemExit as leaving:
        code = leaving.code
    return code, capsys.readouterr().err


RUNNER_COUNTS = ("--n-runners", "--max-concurrency", "--max-rollouts")
NO_ADDRESS = "is no address of a server"
NO_SERVER = "does not answer"
STORE_VERBS = {"status": [], "backup": ["out"], "export": ["out"]}
CASES: list[tuple[list[str], str]] = [
    *((["store", verb, "folder", *more], "a folder") for verb, more in STORE_VERBS.items()),
    *((["store", verb, "nope.db", *more], "There is no store 'nope.db'") for verb, more in STORE_VERBS.items()),
    *((["store", verb, "/proc/nope/x.db", *more], "There is no store") for verb, more in STORE_VERBS.items()),
    *((["store", verb, "binary", *more], "'binary' is not a store") for verb, more in STORE_VERBS.items()),
    *((["store", verb, "empty", *more], "it is empty") for verb, more in STORE_VERBS.items()),
    *((["store", verb, "", *more], "'' is no store") for verb, more in STORE_VERBS.items()),
    *((["store", verb, "{other}", "out"], "needs the file of a store") for verb in ("backup", "export", "import")),
    *((["store", verb, "{silent}", "out"], "needs the file of a store") for verb in ("backup", "export", "import")),
    *((["store", verb, "good.db", ""], "the path is empty") for verb in ("backup", "export")),
    (["store", "backup", "good.db", "folder"], "folder"),
    (["store", "export", "good.db", "folder"], "folder"),
    (["store", "export", "good.db", "/proc/nope/x"], "/proc/nope/x"),
    (["store", "backup", "good.db", "/proc/nope/x"], "/proc/nope/x"),
    (["store", "status", "{other}"], "is no store server"),
    (["store", "status", "{refused}"], NO_SERVER),
    (["store", "status", "http://nope.invalid:4747"], NO_SERVER),
    (["store", "status", "http://"], NO_ADDRESS),
    (["store", "status", "http://[::1"], NO_ADDRESS),
    (["store", "status", "http://127.0.0.1:99999"], NO_ADDRESS),
    (["dashboard", "http://[::1"], NO_ADDRESS),
    (["why", "http://[::1"], NO_ADDRESS),
    (["why", "{other}"], "is no store server"),
    (["why", "{refused}"], NO_SERVER),
    (["why"], "required: STORE"),
    (["why", "good.db"], "The store has no runs yet"),
    (["why", "good.db", "run-9"], "has no run and no rollout 'run-9'"),
    (["why", "nope.db"], "There is no store 'nope.db'"),
    (["run", "--store", "http://127.0.0.1:x", "--", "true"], NO_ADDRESS),
    ([*PROXY, "--store", "http://"], NO_ADDRESS),
    (["runner", "--store", "http://[::1", "misused_agents:agent"], NO_ADDRESS),
    (["runner", "nowhere:agent"], "No module named 'nowhere'. Run the command in the folder of the module"),
    (["runner", "broken_agents:agent"], "RuntimeError: not today (broken_agents.py, line 1)"),
    (["runner", "unparsed_agents:agent"], "(unparsed_agents.py, line 1)"),
    (["runner", "needy_agents:agent"], "No module named 'a_package_that_is_missing'"),
    (["runner", "misused_agents:Demanding"], "TypeError"),
    (["runner", "misused_agents:Short"], "cannot be called with (task, resources, rollout)"),
    (["runner", "misused_agents:missing"], "There is no agent at 'misused_agents:missing'"),
    (["runner", ":agent"], "There is no agent at ':agent'"),
    (["runner", "misused agents:agent"], "There is no agent"),
    (["store", "status", "ftp://x"], "is no store; write http://host:4747"),
    (["store", "status", "localhost:4747"], "or http://host:4747"),
    (["store", "import", "folder", "tasks.jsonl"], "a folder"),
    (["store", "import", "binary", "tasks.jsonl"], "'binary' is not a store"),
    (["store", "import", "", "tasks.jsonl"], "'' is no store"),
    (["store", "import", "/proc/nope/x.db", "tasks.jsonl"], "cannot be made"),
    (["store", "import", "new.db", "nope.jsonl"], "There is no file 'nope.jsonl'"),
    (["store", "import", "new.db", "folder"], "'folder'"),
    (["store", "import", "new.db", "binary"], "nothing was imported"),
    (["store", "import", "new.db", "text"], "nothing was imported"),
    (["store", "import", "new.db", ""], "the path is empty"),
    (["store", "--path", "folder", "--port", "0"], "'folder' is a folder"),
    (["store", "--path", "binary", "--port", "0"], "'binary' is not a store"),
    (["store", "--path", "", "--port", "0"], "the path is empty"),
    (["store", "--path", "text/x.db", "--port", "0"], "Folder 'text' for store 'text/x.db' cannot be made"),
    (["store", "--path", "x.db", "--backend", "memory"], "needs --backend sqlite; a memory store has no file"),
    (["store", "--token", "has space"], "white space"),
    (["store", "--port", "99999"], "99999 is no port; they go from 0, a free one, to 65535"),
    (["store", "--port", "-1"], "-1 is no port"),
    (["store", "--port", "many"], "'many' is no whole number"),
    (["store", "--port", "{taken}"], "Another process may already be using this port"),
    (["store", "--host", "nope.invalid", "--insecure"], "Check the host and the port"),
    (["store", "--host", "0.0.0.0"], "or say --insecure"),
    (["store", "--n-workers", "2"], "start further servers"),
    (["store", "--n-workers", "0"], "0 is too few; give at least 1"),
    (["store", "--lost-worker-seconds", "nan"], "nan is no finite number"),
    (["store", "--lost-worker-seconds", "0"], "0 is no time; give seconds above 0"),
    (["store", "--prot", "5"], "agl store: there is no option --prot; did you mean --port? See `agl store --help`.\n"),
    (["store", "status", "good.db", "--port", "5", "--verbos"], "there is no option --verbos"),
    (["store", "statsu", "good.db"], "did you mean status?"),
    (["store", "backup", "good.db", "text"], "'text' exists; give another path, or --force"),
    (["store", "backup", "--force", "good.db", "text"], "'text' exists and is not a store"),
    (["store", "backup", "good.db", "good.db"], "'good.db' exists"),
    (["store", "backup", "--force", "good.db", "good.db"], "'good.db' is the store itself"),
    (["store", "export", "good.db", "text"], "'text' exists; give another path, or --force"),
    (["store", "--log-level", "LOUD"], "Log level 'LOUD' is unknown"),
    (["dashboard", "folder"], "a folder"),
    (["dashboard", "binary"], "'binary' is not a store"),
    (["dashboard", "{other}"], "has no dashboard"),
    (["dashboard", "{refused}"], NO_SERVER),
    (["dashboard", "good.db", "--port", "99999"], "99999 is no port"),
    (["dashboard", "good.db", "--port", "{taken}"], "Another process may already be using this port"),
    (["demo", "--folder", "/proc/nope"], "give another with --folder"),
    (["demo", "--folder", "text"], "The folder 'text' cannot be made"),
    (["demo", "--folder", "text/below"], "The folder 'text/below' cannot be made"),
    (["demo", "--folder", ""], "the path is empty"),
    (["demo", "--folder", "folder", "--resume"], "There is nothing to resume in 'folder'"),
    (["demo", "--folder", "nowhere", "--resume"], "There is nothing to resume in 'nowhere'"),
    (["demo", "--target", "nan"], "argument --target: nan is no finite number"),
    (["demo", "--target", "-1"], "argument --target: -1 is no mean of rewards"),
    (["demo", "--target", "1.5"], "is no mean of rewards"),
    (["demo", "--target", "high"], "is no number"),
    (["demo", "--seed", "-1"], "argument --seed: "),
    (["demo", "--seed", "9" * 30], "is no seed"),
    (["demo", "--steps", "0"], "give at least 1"),
    (["demo", "--runners", "0"], "give at least 1"),
    (["serve", "nope"], "There is no model 'nope'"),
    (["serve", ""], "There is no model ''"),
    (["serve", "folder"], "'folder' holds no model"),
    (["serve", "binary"], "There is no model 'binary'"),
    (["serve", "tiny", "--dtype", "foo"], "invalid choice: 'foo'"),
    (["serve", "tiny", "--port", "99999"], "99999 is no port"),
    (["serve", "tiny", "--threads", "0"], "give at least 1"),
    (["serve", "tiny", "--max-length", "0"], "give at least 1"),
    (["runner", "--store", "{other}", "misused_agents:agent"], "is no store server"),
    (["runner", "--store", "localhost:4747", "misused_agents:agent"], "must begin with http://"),
    (["runner", "--store", "good.db", "misused_agents:agent"], "must begin with http://"),
    (["runner", "misused_agents:number"], "'misused_agents:number' is of type int, no agent"),
    *((["runner", option, "0", "misused_agents:agent"], "give at least 1") for option in RUNNER_COUNTS),
    (["runner", "--grace", "-1", "misused_agents:agent"], "-1 is negative; give 0 or more"),
    (["runner", "--grace", "nan", "misused_agents:agent"], "nan is no finite number"),
    (["runner", "--stoer", "x", "misused_agents:agent"], "did you mean --store?"),
    (["runner"], "required: MODULE:AGENT"),
    (["runner", ""], "write it as module:agent"),
    (["run", "--store", "folder", "--", "true"], "a folder"),
    (["run", "--store", "binary", "--", "true"], "'binary' is not a store"),
    (["run", "--store", "", "--", "true"], "'' is no store"),
    (["run", "--store", "{other}", "--", "true"], "is no store server"),
    (["run", "--store", "{refused}", "--", "true"], NO_SERVER),
    (["run", "--show", "ro-1", "--store", "folder"], "a folder"),
    (["run", "--show", "ro-1", "--store", "nope.db"], "There is no store 'nope.db'"),
    (["run", "--show", "ro-1", "--store", "{other}"], "is no store server"),
    (["run", "--max-cost", "nan", "--", "true"], "nan is no finite number"),
    (["run", "--max-cost", "inf", "true", "--option-of-true"], "--max-cost: inf is no finite number"),
    (["run", "--max-calls", "-1", "--", "true"], "-1 is negative"),
    (["run", "--stoer", "x", "--", "true", "--else"], "there is no option --stoer; did you mean --store?"),
    (["run", "--config", "folder", "--", "true"], "'folder' cannot be read"),
    (["run", "--config", "", "--", "true"], "the path is empty"),
    (["run"], "there is no program to run"),
    (["run", "--"], "there is no program to run"),
    (["run", "--task", "{{", "--", "true"], "--task is no JSON"),
    (["run", "--model", "gpt", "--", "true"], "does not say where the model is"),
    (["run", "--proxy", "trainer", "--", "true"], "is no address"),
    (["run", "--proxy", "http://127.0.0.1:1", "--max-calls", "1", "--", "true"], "limits of its own"),
    (["run", "--store", "ftp://x", "--", "true"], "is no store"),
    (["run", "--env", "NO_SUCH_TOKEN", "--", "true"], "there is no variable NO_SUCH_TOKEN"),
    (["run", "--env", "NO_SUCH_TOKEN=x", "--", "true"], "there is no variable NO_SUCH_TOKEN=x"),
    (["run", "--env", "OPENAI_API_KEY", "--", "true"], "the proxy has OPENAI_API_KEY"),
    (["run", "--env", "AGL_PROXY_API_KEY", "--", "true"], "the proxy has AGL_PROXY_API_KEY"),
    (["proxy"], "There is no model to serve"),
    (["proxy", "--model", "gpt"], "does not say where the model is"),
    (["proxy", "--model", "=http://127.0.0.1:1/v1"], "does not say where the model is"),
    (["proxy", "--model", "gpt=gpt-4.1"], "names no provider"),
    (["proxy", "--model", "gpt=ftp://x"], "names no provider"),
    (["proxy", "--model", "m=hosted_vllm/m"], "has no address"),
    (["proxy", "--config", "missing.yaml"], "cannot be read"),
    (["proxy", "--config", "torn.json"], "is no JSON"),
    (["proxy", "--config", "torn.yaml"], "is no YAML"),
    (["proxy", "--config", "list.json"], "must be a mapping"),
    (["proxy", "--config", "odd.json"], "it must be a list"),
    (["proxy", "--host", "0.0.0.0"], "AGL_PROXY_API_KEY"),
    ([*PROXY, "--port", "{taken}"], "Another process may already be using this port"),
    ([*PROXY, "--store", "ftp://x"], "is no store"),
    ([*PROXY, "--max-calls", "1"], "without --store there is none"),
    ([*PROXY, "--port", "70000"], "70000 is no port"),
    ([*PROXY, "--retries", "-1"], "-1 is negative"),
    ([*PROXY, "--deadline", "0"], "0 is no time"),
    ([*PROXY, "--deadline", "inf"], "inf is no finite number"),
    ([*PROXY, "--run-max-cost", "nan"], "nan is no finite number"),
    ([*PROXY, "--max-calls", "-1"], "-1 is negative"),
    ([*PROXY, "--store", "folder"], "a folder"),
    ([*PROXY, "--store", "binary"], "'binary' is not a store"),
    ([*PROXY, "--store", "{other}"], "is no store server"),
    ([*PROXY, "--config", "binary"], "'binary' cannot be read"),
    ([*EVAL, "--data", "nope"], "The data 'nope' cannot be read"),
    ([*EVAL, "--data", "binary"], "Line 1 of 'binary' is not JSON"),
    ([*EVAL, "--data", ""], "the path is empty"),
    ([*EVAL, "--data", "empty"], "There are no tasks in 'empty'"),
    ([*EVAL, "--data", "torn.jsonl"], "Line 2 of 'torn.jsonl' is not JSON"),
    (["eval", "http://x/v1", *EVAL[4:], "--data", "tasks.jsonl"], "Say it with --model"),
    ([*EVAL, "--data", "tasks.jsonl", "--prompt", "binary"], "The prompt 'binary' cannot be read"),
    ([*EVAL, "--data", "tasks.jsonl", "--store", "folder"], "a folder"),
    ([*EVAL, "--data", "tasks.jsonl", "--store", ""], "'' is no store"),
    ([*EVAL, "--data", "tasks.jsonl", "--n", "0"], "give at least 1"),
    ([*EVAL, "--data", "tasks.jsonl", "--timeout", "-1"], "-1 is no time"),
    ([*EVAL, "--data", "tasks.jsonl", "--timeout", "nan"], "nan is no finite number"),
    ([*EVAL, "--data", "tasks.jsonl", "--temperature", "nan"], "nan is no finite number"),
    ([*EVAL, "--data", "tasks.jsonl", "--failed", "nan"], "neither worst, skip nor a finite number"),
    (["eval", "nope", *EVAL[2:], "--data", "tasks.jsonl"], "There is no model 'nope'"),
    (["eval", "folder", *EVAL[2:], "--data", "tasks.jsonl"], "'folder' holds no model"),
    (["export-model", "nope", "out"], "There is no folder 'nope'"),
    (["export-model", "binary", "out"], "There is no folder 'binary'"),
    (["export-model", "folder", "out"], "'folder' holds neither checkpoints"),
    (["export-model", "folder", "out", "--step", "-1"], "-1 is negative"),
    (["export-model", "", "out"], "the path is empty"),
    (["agentops", "--port", "99999"], "99999 is no port"),
    (["agentops", "--port", "{taken}"], "Another process may already be using this port"),
    *((["tokens", "show", word], "agl tokens: ") for word in ("", "a-master-token", "agl1.nonsense.x")),
    (["tokens", "runner"], "There is no master token to sign with"),
    (["tokens", "runner", "--token", "x", "--expires", "7y"], "is not a duration"),
    (["tokens", "runer"], "did you mean runner?"),
    (["trian"], "agl: there is no command 'trian'; did you mean `agl demo`? See `agl --help`.\n"),
    (["dashbord", "good.db"], "did you mean `agl dashboard`?"),
    (["status", "good.db"], "did you mean `agl store status`?"),
    (["--verson"], "there is no option --verson; did you mean --version?"),
    (["zzz"], "there is no command 'zzz'. See `agl --help`"),
    (["vllm", "--model"], "--model is the last word"),
    (["vllm", "./m", "--memory", "40"], "gpu_memory_utilization is 40.0; it must be above 0 and at most 1"),
    (["vllm", "./m", "--lora-rank", "1000"], "up to rank 512"),
    (["vllm", "server", "m"], "unrecognized arguments: m"),
    (["vllm", "./m", "--host", "0.0.0.0"], "--host 0.0.0.0 needs --transfer nccl and full weights"),
    (["vllm", "Qwen/Qwen2.5-0.5B"], "write `agl vllm serve NAME`"),
]


@pytest.mark.parametrize(("arguments", "expected"), CASES, ids=[" ".join(case[0]) or "nothing" for case in CASES])
def test_misuse_is_one_clear_line(
    arguments: list[str], expected: str, folder: Path, places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))

    code, shown = run(capsys, [word.format(**vars(places)) for word in arguments])

    assert code in (1, 2)
    assert expected in shown
    assert "Traceback" not in shown
    assert len(shown.splitlines()) <= 2  # what is wrong, and before it at most a warning
    left = [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]
    assert [path for path in left if not path.name.endswith((".db-wal", ".db-shm"))] == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["proxy", "--config", "models.yaml"], "pip install pyyaml"),
        (["vllm", "serve", "m"], "pip install vllm"),
        (["vllm", "./m"], "vLLM is not installed beside this package: run `pip install"),
    ],
    ids=" ".join,
)
def test_what_is_not_installed_is_one_line_that_says_how_to_get_it(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "models.yaml").write_text("model_list: []")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "yaml", None)

    code, shown = run(capsys, arguments)

    assert (code, shown.count("\n")) == (1, 1)
    assert expected in shown


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize(
    "arguments", [["store", "status", "good.db"], ["dashboard", "good.db"], ["store", "import", "good.db", "text"]]
)
def test_a_file_of_somebody_else_is_one_clear_line(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "good.db").chmod(0)

    code, shown = run(capsys, arguments)

    assert (code, "Traceback" in shown) == (1, False)
    assert "good.db" in shown


@pytest.mark.parametrize("kind", [["rollout"], {"rollout": 1}], ids=["list", "object"])
def test_an_archive_with_an_odd_kind_leaves_no_store(
    kind: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["store", "export", "good.db", "odd.jsonl"])
    odd = folder / "odd.jsonl"
    odd.write_text(odd.read_text() + json.dumps({"kind": kind, "value": {}}) + "\n")

    code, shown = run(capsys, ["store", "import", "new.db", "odd.jsonl"])

    assert (code, "Traceback" in shown) == (1, False)
    assert "is not an archive record; nothing was imported" in shown
    assert not list(folder.glob("new.db*"))


def test_a_store_in_a_folder_that_is_not_there_makes_the_folder(folder: Path) -> None:
    assert main(["run", "--store", "runs/today/runs.db", "--", "true"]) == 0

    assert (folder / "runs" / "today" / "runs.db").is_file()
    assert (folder / "runs" / "today").stat().st_mode & 0o777 == 0o700


def test_a_model_that_cannot_be_is_refused_before_torch_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: pytest.fail(f"{name} was looked for"))

    assert run(capsys, ["serve", "gpt-4o"])[0] == 1


def test_ctrl_c_during_the_start_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(address: str, token: str | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("agentlightning.cli.store.statistics_of", interrupted)

    assert run(capsys, ["store", "status", "http://127.0.0.1:4747"]) == (130, "agl store: Stopped by Ctrl-C.\n")


# ---------------------------------------------------------------------- servers that do not answer, or slowly


@pytest.mark.parametrize(
    "arguments",
    [
        ["store", "status", "{silent}"],
        ["dashboard", "{silent}"],
        ["run", "--store", "{silent}", "--", "true"],
        ["run", "--show", "ro-1", "--store", "{silent}"],
    ],
    ids=" ".join,
)
def test_a_server_that_never_answers_is_given_up(
    arguments: list[str],
    folder: Path,
    places: Places,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(stores, "FIRST_RESPONSE_SECONDS", 0.1)

    code, shown = run(capsys, [word.format(**vars(places)) for word in arguments])

    assert code == 1
    assert f"'{places.silent}' does not answer (nothing came within 0.1 s)" in shown


def test_a_runner_takes_its_limits_and_says_that_it_waits_for_a_store(
    folder: Path, places: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(stores, "FIRST_RESPONSE_SECONDS", 0.1)
    monkeypatch.setattr(ClientServerExecutionStrategy, "execute", lambda *parts: started.append(parts[2].runner))

    limits = ["--max-rollouts", "2", "--max-concurrency", "4"]
    code, shown = run(capsys, ["runner", "--store", places.silent, *limits, "misused_agents:agent"])

    assert code == 0
    assert "does not answer" in shown
    assert "It is waited for." in shown
    assert [(runner._max_rollouts, runner._max_concurrency) for runner in started] == [(2, 4)]


def test_a_store_that_keeps_a_command_out_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = "a-token-of-some-length-0123456789"
    with ServerProcess(token=token) as server:
        assert run(capsys, ["store", "status", server.url, "--token", token])[0] == 0
        for command in (
            ["store", "status", server.url],
            ["why", server.url],
            ["run", "--store", server.url, "--", "true"],
            ["runner", "--store", server.url, "misused_agents:agent"],
            ["proxy", "--store", server.url, "--model", "m=http://127.0.0.1:9/v1", "--port", "0"],
        ):
            code, shown = run(capsys, command)

            assert (code, "Traceback" in shown) == (1, False), command
            assert "This server wants a token; set AGL_STORE_TOKEN" in shown


class SlowStore(Another):
    """Answers its health check at once, and a question to the store only after the time of a first answer."""

    def do_GET(self) -> None:
        answer: Any = {"status": "ok"}
        if self.path != "/health":
            time.sleep(FIRST_ANSWER_SECONDS * 1.2)
            answer = dict(asyncio.run(InMemoryLightningStore().statistics()))
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_slow_store_that_has_answered_is_not_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stores, "FIRST_RESPONSE_SECONDS", FIRST_ANSWER_SECONDS)
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowStore) as slow:
        thread = threading.Thread(target=slow.serve_forever, args=(0.01,))
        thread.start()

        code = main(["store", "status", f"http://127.0.0.1:{slow.server_port}"])
        slow.shutdown()
        thread.join()

    assert code == 0
    assert "InMemoryLightningStore" in capsys.readouterr().out
