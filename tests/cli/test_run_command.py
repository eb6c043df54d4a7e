"""`agl run`: programs in several languages, none of which knows of it, are run and recorded."""

import asyncio
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentlightning.cli import main
from agentlightning.cli.models import passed_through
from agentlightning.emitter import find_final_reward
from agentlightning.store import LightningStore, LightningStoreClient, SqliteLightningStore
from agentlightning.store.http.tokens import Scope, sign_token
from agentlightning.types import Rollout, Span
from tests import warm_python
from tests.e2e.server_process import ServerProcess, left_behind
from tests.stub_model.script import Failure, Script
from tests.stub_model.server import StubModel, running

PATIENCE_SECONDS = 60.0
REAL_KEY = "sk-real-key-of-the-provider-0123456789"
MASTER = "the-master-token-of-this-server"
PROXY_KEY = "a-key-of-the-proxy-0123456789"
PYTHON = """
import os, openai
client = openai.OpenAI()
answer = client.chat.completions.create(
    model=os.environ.get("OPENAI_MODEL", "stub-model"), messages=[{"role": "user", "content": "Hello there"}]
)
print(answer.choices[0].message.content)
print(os.environ["OPENAI_API_KEY"])
"""
WITHOUT_SDK = """
import json, os, urllib.request
model = os.environ.get("OPENAI_MODEL", "stub-model")
asked = {"model": model, "messages": [{"role": "user", "content": "Hello there"}]}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode(), headers)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""
"""For what is the same whichever library calls; it begins much sooner."""
ANTHROPIC = """
import anthropic
client = anthropic.Anthropic()
answer = client.messages.create(
    model="claude-stub", max_tokens=50, messages=[{"role": "user", "content": "Hello there"}]
)
print(answer.content[0].text)
"""
NODE = """
const answer = await fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {
  method: "POST",
  headers: {"content-type": "application/json", authorization: "Bearer " + process.env.OPENAI_API_KEY},
  body: JSON.stringify({model: "stub-model", messages: [{role: "user", content: "Hello there"}]}),
})
console.log((await answer.json()).choices[0].message.content)
"""
ON_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes its standard input the terminal of its session, as a login does."""
INTERRUPTED = """
import signal, sys, time
count = 0
def note(*_):
    global count
    count += 1
signal.signal(signal.SIGINT, note)
print("tty", sys.stdout.isatty(), sys.stdin.isatty(), flush=True)
deadline = time.monotonic() + 30
while not count and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep(0.5)  # for a second one, which must not come
print("heard", count, flush=True)
"""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert left_behind() == []


def environment(**changes: str) -> dict[str, str]:
    left_out = ("AGL_", "OPENAI_", "ANTHROPIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**kept, "PYTHONPATH": str(Path(__file__).parents[2]), **changes}


def agl_run(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agentlightning.cli", "run", *arguments]


class Runs:
    """The command in a folder of its own, where a store comes to be."""

    def __init__(self, folder: Path, model: StubModel) -> None:
        self.folder = folder
        self.model = model

    @property
    def provider(self) -> dict[str, str]:
        return {"OPENAI_BASE_URL": self.model.openai_url, "OPENAI_API_KEY": REAL_KEY}

    def __call__(self, *arguments: str, stdin: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
        return warm_python.run(
            agl_run(*arguments),
            cwd=self.folder,
            env=environment(**{**self.provider, **changes}),
            stdin=stdin,
            timeout=PATIENCE_SECONDS,
            start_new_session=True,
        )

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return warm_python.Popen(
            agl_run(*arguments),
            cwd=self.folder,
            env=environment(**self.provider),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def file(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return name

    def recorded(self) -> tuple[Rollout, list[Span]]:
        """The only rollout of the default store, and its spans."""
        return asyncio.run(self._recorded())

    async def _recorded(self) -> tuple[Rollout, list[Span]]:
        async with SqliteLightningStore(self.folder / "agentlightning.db") as store:
            return await only_rollout(store)


async def only_rollout(store: LightningStore) -> tuple[Rollout, list[Span]]:
    (rollout,) = await store.query_rollouts()
    return rollout, list(await store.query_spans(rollout.rollout_id))


def calls_in(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.name == "litellm_request"]


@pytest.fixture
def runs(tmp_path: Path, stub_model: StubModel) -> Runs:
    return Runs(tmp_path, stub_model)


RunsHere = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def runs_here(runs: Runs, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunsHere:
    """The command in this process, where neither its own process nor its environment is in question."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        with monkeypatch.context() as patches:
            patches.chdir(runs.folder)
            for name in os.environ.keys() - environment().keys():
                patches.delenv(name)
            for name, value in runs.provider.items():
                patches.setenv(name, value)
            code = main(["run", *arguments])
        return subprocess.CompletedProcess(agl_run(*arguments), code, *capfd.readouterr())

    return run


# ---------------------------------------------------------------------- programs that know nothing


def test_a_python_script_is_recorded_without_a_changed_line(runs: Runs) -> None:
    runs.model.api_key = REAL_KEY

    done = runs("--", sys.executable, runs.file("script.py", PYTHON))

    said, key = done.stdout.split("\n")[:2]
    rollout, spans = runs.recorded()
    (call,) = calls_in(spans)
    assert (done.returncode, said, rollout.status) == (0, "Hello there", "succeeded")
    assert key.startswith("agl-attempt-")
    assert call.attributes["gen_ai.completion.0.content"] == "Hello there"
    assert rollout.input == f"{sys.executable} script.py"
    assert f"agl run --show {rollout.rollout_id} --store agentlightning.db" in done.stderr
    assert re.search(r"model calls\s*│ 1 ", done.stderr)


def test_real_keys_reach_neither_program_nor_record(runs: Runs) -> None:
    program = "import os; print([name for name, value in os.environ.items() if 'sk-' + 'real' in value])"
    secrets = {
        "ANTHROPIC_API_KEY": f"{REAL_KEY}-a",
        "ANTHROPIC_AUTH_TOKEN": f"{REAL_KEY}-b",
        "AGL_PROXY_API_KEY": REAL_KEY,
    }

    runs("--", sys.executable, runs.file("script.py", WITHOUT_SDK), **secrets)
    done = runs("--", sys.executable, "-c", program, **secrets)

    assert done.stdout == "[]\n"
    assert runs.model.requests[-1].headers["authorization"] == f"Bearer {REAL_KEY}"
    for path in runs.folder.rglob("*"):
        assert path.is_dir() or REAL_KEY.encode() not in path.read_bytes(), path


def test_a_script_with_the_anthropic_sdk_goes_to_its_own_provider(runs: Runs) -> None:
    with running(models=("claude-stub",), api_key=REAL_KEY) as claude:
        script = runs.file("script.py", ANTHROPIC)
        done = runs("--", sys.executable, script, ANTHROPIC_BASE_URL=claude.url, ANTHROPIC_AUTH_TOKEN=REAL_KEY)

    (call,) = calls_in(runs.recorded()[1])
    assert (done.returncode, done.stdout) == (0, "Hello there\n"), done.stderr
    assert claude.requests[0].dialect == "messages"
    assert call.attributes["agentlightning.proxy.requested_model"] == "claude-stub"


@pytest.mark.parametrize(
    ("variables", "headers"),
    [("ANTHROPIC_API_KEY", None), ("ANTHROPIC_AUTH_TOKEN", "t"), ("ANTHROPIC_API_KEY ANTHROPIC_AUTH_TOKEN", None)],
)
def test_a_token_for_anthropic_is_sent_where_there_is_no_key(
    monkeypatch: pytest.MonkeyPatch, variables: str, headers: str | None
) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(name, "t" if name in variables else "")

    sent = passed_through().entries[0]["litellm_params"].get("extra_headers")

    assert sent == (None if headers is None else {"Authorization": f"Bearer {headers}"})


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_a_script_for_node_is_recorded(runs: Runs) -> None:
    done = runs("--", "node", runs.file("agent.mjs", NODE))

    assert (done.returncode, done.stdout) == (0, "Hello there\n"), done.stderr
    assert len(calls_in(runs.recorded()[1])) == 1


def test_calls_that_fail_are_told(runs: Runs) -> None:
    runs.model.script = Script([Failure(400, "no")] * 2)  # the second try is without what the proxy adds

    done = runs("--", sys.executable, runs.file("script.py", WITHOUT_SDK))

    assert done.returncode == 1
    assert "HTTP Error 400" in done.stderr
    assert re.search(r"model calls\s*│ 1 \(1 failed\)", done.stderr)


# ---------------------------------------------------------------------- as if a shell had started it


@pytest.mark.parametrize(
    ("command", "code", "status"),
    [("true", 0, "succeeded"), ("exit 3", 3, "failed"), ("kill -KILL $$", 137, "failed")],
)
def test_the_exit_code_is_the_program_s(runs: Runs, runs_here: RunsHere, command: str, code: int, status: str) -> None:
    done = runs_here("--", "sh", "-c", command)

    assert done.returncode == code
    assert runs.recorded()[0].status == status
    assert "Traceback" not in done.stderr


def test_a_program_that_is_not_there_is_told_as_shells_do(runs: Runs, runs_here: RunsHere) -> None:
    done = runs_here("--", "no-such-program")

    assert done.returncode == 127
    assert "There is no program 'no-such-program'" in done.stderr
    assert runs.recorded()[0].status == "failed"


@pytest.mark.parametrize(
    "words",
    [
        ("printf", "%s ", "--reward", "--", "-x"),
        ("--reward", "none", "--", "printf", "%s ", "--reward", "--", "-x"),
    ],
)
def test_the_words_of_the_program_are_its_own(runs_here: RunsHere, words: tuple[str, ...]) -> None:
    assert runs_here(*words).stdout == "--reward -- -x "


def test_input_and_output_pass_through_as_they_come(runs: Runs) -> None:
    process = runs.start("--", "sh", "-c", 'echo first; read -r line; echo "got $line"; echo oops >&2')
    assert process.stdout is not None

    first = process.stdout.readline()  # while the program waits for what comes next
    out, err = process.communicate("second\n", timeout=PATIENCE_SECONDS)

    assert (first, out) == ("first\n", "got second\n")
    assert err.startswith("oops\n")
    texts = {span.name: span.attributes.get("agentlightning.command.text") for span in runs.recorded()[1]}
    assert texts["command.stdout"] == "first\ngot second\n"
    assert texts["command.stderr"] == "oops\n"


def test_sigterm_goes_to_the_program_and_its_calls_are_stored(runs: Runs) -> None:
    script = f"{WITHOUT_SDK}import signal, sys\n"
    script += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); print('waiting', flush=True); signal.pause()\n"
    process = runs.start("--", sys.executable, runs.file("script.py", script))
    assert process.stdout is not None
    while "waiting" not in (line := process.stdout.readline()):
        assert line, process.communicate()

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_SECONDS)

    rollout, spans = runs.recorded()
    assert (process.returncode, rollout.status, len(calls_in(spans))) == (5, "failed", 1)


def test_a_terminal_is_the_program_s_own_and_ctrl_c_reaches_it_once(runs: Runs) -> None:
    master, slave = pty.openpty()
    command = agl_run("--", sys.executable, runs.file("script.py", INTERRUPTED))
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, *command],
        cwd=runs.folder,
        env=environment(**runs.provider),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        shown = read_until(master, b"tty True True")
        os.write(master, b"\x03")
        shown += read_until(master, b"--store agentlightning.db")
        code = process.wait(PATIENCE_SECONDS)
    finally:
        process.kill()
        process.wait()
        os.close(master)

    assert b"heard 1" in shown
    assert code == 0
    assert "command.stdout" not in [span.name for span in runs.recorded()[1]]


def read_until(terminal: int, words: bytes) -> bytes:
    shown = b""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while words not in shown:
        assert time.monotonic() < deadline, shown
        shown += os.read(terminal, 4096)
    return shown


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("source", "command", "code", "reward"),
    [
        ("exit_code", "exit 4", 4, 0.0),
        ("stdout", "echo 0.75", 0, 0.75),
        ("none", "echo 0.75", 0, None),
    ],
)
def test_a_reward_is_read_where_it_is_said_to_be(
    runs: Runs, runs_here: RunsHere, source: str, command: str, code: int, reward: float | None
) -> None:
    done = runs_here("--reward", source, "--", "sh", "-c", command)

    rollout, spans = runs.recorded()
    assert (done.returncode, rollout.status, find_final_reward(spans)) == (code, "succeeded", reward)
    assert re.search(rf"reward\s*│ {'none' if reward is None else f'{reward:g}'} ", done.stderr)


def test_a_reward_that_cannot_be_read_fails_the_rollout_and_is_told(runs: Runs, runs_here: RunsHere) -> None:
    done = runs_here("--reward", "stdout", "--", "echo", "well")

    assert done.returncode == 0
    assert "The last line of stdout must be a number" in done.stderr
    assert runs.recorded()[0].status == "failed"


def test_a_task_is_the_rollout_s_input_and_reaches_the_program(runs: Runs, runs_here: RunsHere) -> None:
    done = runs_here("--task", '{"n": 1}', "--", "sh", "-c", 'echo "$AGL_TASK"')

    assert json.loads(done.stdout) == {"n": 1}
    assert runs.recorded()[0].input == {"n": 1}


def test_a_model_is_served_from_elsewhere_under_its_name(runs: Runs) -> None:
    script = runs.file("script.py", WITHOUT_SDK)
    with running(models=("mine",)) as other:
        done = runs("--model", f"gpt-x=openai/mine@{other.openai_url}", "--", sys.executable, script)

    assert (done.returncode, done.stdout.split("\n")[0]) == (0, "Hello there"), done.stderr
    assert [request.body["model"] for request in other.requests if request.dialect == "chat"] == ["mine"]
    assert runs.model.requests == []


def test_a_budget_is_kept(runs: Runs) -> None:
    done = runs("--max-calls", "1", "--", sys.executable, runs.file("s.py", WITHOUT_SDK + WITHOUT_SDK))

    assert (done.returncode, len(runs.model.requests)) == (1, 1)
    assert "HTTP Error 403" in done.stderr


@pytest.fixture
def proxy_of(runs: Runs) -> Iterator[Callable[[str], str]]:
    """Starts a locked `agl proxy` for a store, and gives its address."""
    started: list[subprocess.Popen[str]] = []

    def start(store: str) -> str:
        model = f"stub-model={runs.model.openai_url}"
        options = ["--store", store, "--port", "0", "--model", model]
        process = warm_python.Popen(
            [sys.executable, "-m", "agentlightning.cli", "proxy", *options],
            env=environment(AGL_PROXY_API_KEY=PROXY_KEY),
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stderr is not None
        found = re.search(r" at (http://[\w.:]+) ", process.stderr.readline())
        assert found is not None
        return found[1]

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=PATIENCE_SECONDS)


async def test_a_proxy_that_runs_already_is_used(runs: Runs, proxy_of: Callable[[str], str]) -> None:
    script = runs.file("script.py", WITHOUT_SDK)
    with ServerProcess() as server:
        options = ("--store", server.url, "--proxy", proxy_of(server.url))
        done = await asyncio.to_thread(runs, *options, "--", sys.executable, script, AGL_PROXY_API_KEY=PROXY_KEY)
        async with LightningStoreClient(server.url) as store:
            rollout, spans = await only_rollout(store)

    assert (done.returncode, rollout.status, len(calls_in(spans))) == (0, "succeeded", 1), done.stderr
    assert not (runs.folder / "agentlightning.db").exists()


async def test_the_token_of_a_runner_is_not_the_program_s(runs: Runs) -> None:
    token = sign_token(MASTER, Scope("runner"), expires_at=None)
    program = "import os; print([name for name, value in os.environ.items() if 'agl' + '1.' in value])"
    with ServerProcess(token=MASTER) as server:
        command = ("--store", server.url, "--", sys.executable, "-c", program)
        done = await asyncio.to_thread(runs, *command, AGL_STORE_TOKEN=token)

    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert "programs get no token" in done.stderr


def test_the_trace_of_a_rollout_is_shown(runs: Runs, runs_here: RunsHere) -> None:
    runs("--reward", "exit_code", "--", sys.executable, runs.file("script.py", WITHOUT_SDK))
    rollout, _ = runs.recorded()

    shown = runs_here("--show", rollout.rollout_id)

    assert shown.returncode == 0, shown.stderr
    assert re.search(r"model call +│ stub-model +│ 5\+3 +│ [\d.]+ +│ Hello there", shown.stdout)
    assert "reward 1" in shown.stdout
    spans = [json.loads(line) for line in runs_here("--show", rollout.rollout_id, "--json").stdout.splitlines()]
    assert {span["rollout_id"] for span in spans} == {rollout.rollout_id}
    missing = runs_here("--show", "ro-missing")
    assert (missing.returncode, "There is no rollout 'ro-missing'" in missing.stderr) == (1, True)


# ---------------------------------------------------------------------- what goes wrong


def test_credentials_reach_the_program_only_by_name(runs: Runs) -> None:
    program = "import os, sys; print([name for name in os.environ if name.startswith('MY_')]); sys.exit(3)"
    variables = {"MY_TOKEN": "token-of-the-user", "MY_PASSWORD": "password-of-the-user", "MY_COLOUR": "red"}

    done = runs("--env", "MY_TOKEN", "--", sys.executable, "-c", program, **variables)

    assert (done.returncode, sorted(json.loads(done.stdout.replace("'", '"')))) == (3, ["MY_COLOUR", "MY_TOKEN"])
    assert re.search(r"did not inherit .*MY_PASSWORD.*--env NAME", done.stderr)
    assert "password-of-the-user" not in done.stderr


def test_a_reader_that_has_gone_ends_the_program(runs: Runs) -> None:
    process = runs.start("--", "yes")
    assert process.stdout is not None

    assert process.stdout.readline() == "y\n"
    process.stdout.close()

    assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGPIPE
    process.stdout = None
    process.communicate()


def test_a_proxy_of_the_network_is_not_asked_for_ours(runs: Runs) -> None:
    away = "http://127.0.0.1:9"
    changes = {"HTTP_PROXY": away, "http_proxy": away, "NO_PROXY": "example.org", "no_proxy": "example.org"}

    done = runs("--", sys.executable, runs.file("script.py", WITHOUT_SDK), **changes)

    assert (done.returncode, done.stdout.split("\n")[0]) == (0, "Hello there"), done.stderr
