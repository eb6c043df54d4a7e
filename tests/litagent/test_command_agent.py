"""Programs as agents: what they are told, what becomes of what they say, and how they end."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.litagent.command import CommandAgent
from agentlightning.store import InMemoryLightningStore, LightningStoreServer
from agentlightning.store.http.tokens import verify_token
from agentlightning.types import LLM, PromptTemplate, ProxyLLM, Rollout
from tests.litagent.workbench import Workbench
from tests.stub_model.server import StubModel

pytestmark = pytest.mark.usefixtures("no_process_is_left")

PRINT_ENVIRONMENT = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]

OPENAI_PROGRAM = """
import json, os, sys
from openai import OpenAI

task = json.load(sys.stdin)
with OpenAI() as client:
    told = client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": task["question"]}]
    )
answer = told.choices[0].message.content
print("answer:", answer)
print(json.dumps({"reward": float(answer == task["expected"])}))
"""

OTEL_PROGRAM = """
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
with provider.get_tracer("program").start_as_current_span("inside"):
    pass
"""


def shell(script: str, **options: Any) -> CommandAgent:
    return CommandAgent(["sh", "-c", script], **options)


def python(code: str, **options: Any) -> CommandAgent:
    return CommandAgent([sys.executable, "-c", code], **options)


def served_by(stub_model: StubModel) -> dict[str, Any]:
    return {"llm": LLM(endpoint=stub_model.openai_url, model="stub-model", api_key="sk-of-the-stub")}


async def environment_of(workbench: Workbench, agent: CommandAgent, **options: Any) -> dict[str, str]:
    outcome = await workbench.run(agent, **options)
    assert outcome.error is None
    environment: dict[str, str] = json.loads(outcome.text("stdout"))
    return environment


# ---------------------------------------------------------------------- real programs


async def test_a_shell_script_reads_the_task_and_says_its_reward(workbench: Workbench, tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text("#!/bin/sh\ncat > seen.json\necho working >&2\necho 0.75\n")
    script.chmod(0o755)

    outcome = await workbench.run(CommandAgent(["./agent.sh"], cwd=tmp_path), {"question": "2+2", "n": [1, 2]})

    assert (outcome.attempt.status, outcome.reward) == ("succeeded", 0.75)
    assert json.loads((tmp_path / "seen.json").read_text()) == {"question": "2+2", "n": [1, 2]}
    assert outcome.text("stderr") == "working\n"


async def test_a_program_with_the_openai_sdk_needs_no_configuration(
    workbench: Workbench, stub_model: StubModel
) -> None:
    pytest.importorskip("openai")
    task = {"question": "Hello there", "expected": "Hello there"}

    outcome = await workbench.run(python(OPENAI_PROGRAM), task, resources=served_by(stub_model))

    assert (outcome.error, outcome.reward) == (None, 1.0)
    assert stub_model.requests[0].text == "Hello there"


async def test_a_program_gets_a_token_for_its_attempt_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("AGL_STORE_TOKEN", "the-master-token")
    server = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0)
    await server.start()
    try:
        save = "import os; open('token', 'w').write(os.environ['AGL_STORE_TOKEN'])"
        outcome = await Workbench(server).run(python(f"{OTEL_PROGRAM}\n{save}", cwd=tmp_path))
    finally:
        await server.stop()
    token = (tmp_path / "token").read_text()

    assert outcome.span("inside").rollout_id == outcome.attempt.rollout_id
    assert verify_token("the-master-token", token, 0).attempt_id == outcome.attempt.attempt_id


# ---------------------------------------------------------------------- what it is told


async def test_the_environment_tells_all(workbench: Workbench, llm: LLM) -> None:
    prompt = PromptTemplate(template="Say {x}", engine="f-string")

    told = await environment_of(
        workbench, CommandAgent(PRINT_ENVIRONMENT), task=[1, "two"], resources={"llm": llm, "prompt": prompt}
    )

    assert told["OPENAI_BASE_URL"] == told["OPENAI_API_BASE"] == "http://127.0.0.1:9/v1"
    assert told["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
    assert told["OPENAI_MODEL"] == told["AGL_MODEL"] == "large"
    assert json.loads(told["AGL_TASK"]) == [1, "two"]
    assert json.loads(told["AGL_RESOURCES"])["prompt"]["template"] == "Say {x}"
    ids = f"agentlightning.rollout_id={told['AGL_ROLLOUT_ID']},agentlightning.attempt_id={told['AGL_ATTEMPT_ID']}"
    assert told["OTEL_RESOURCE_ATTRIBUTES"].endswith(ids)
    assert not Path(told["AGL_REWARD_FILE"]).parent.exists()  # any more


async def test_a_proxied_model_has_a_url_that_names_the_attempt(workbench: Workbench) -> None:
    proxied = ProxyLLM(endpoint="http://proxy/v1", model="m")

    told = await environment_of(workbench, CommandAgent(PRINT_ENVIRONMENT), resources={"llm": proxied})

    url = f"http://proxy/rollout/{told['AGL_ROLLOUT_ID']}/attempt/{told['AGL_ATTEMPT_ID']}"
    assert (told["OPENAI_BASE_URL"], told["ANTHROPIC_BASE_URL"]) == (f"{url}/v1", url)
    assert json.loads(told["AGL_RESOURCES"])["llm"]["endpoint"] == f"{url}/v1"


async def test_other_agents_resources_are_not_told(workbench: Workbench, llm: LLM) -> None:
    other = LLM(endpoint="http://other", model="other")
    told = await environment_of(workbench, CommandAgent(PRINT_ENVIRONMENT), resources={"a/llm": other, "llm": llm})
    assert told["AGL_MODEL"] == "large"
    assert list(json.loads(told["AGL_RESOURCES"])) == ["llm"]


@pytest.mark.parametrize(("inherit", "expected"), [(True, "ours"), (False, None)], ids=["inherited", "not inherited"])
async def test_the_environment_is_inherited_if_wanted(
    workbench: Workbench, monkeypatch: pytest.MonkeyPatch, inherit: bool, expected: str | None
) -> None:
    monkeypatch.setenv("OF_THE_RUNNER", "ours")
    told = await environment_of(workbench, CommandAgent(PRINT_ENVIRONMENT, inherit_env=inherit, env={"ADDED": "1"}))
    assert (told.get("OF_THE_RUNNER"), told["ADDED"]) == (expected, "1")


async def test_what_the_user_adds_wins_over_the_model_of_the_resources(workbench: Workbench, llm: LLM) -> None:
    agent = CommandAgent(PRINT_ENVIRONMENT, env={"OPENAI_MODEL": "mine", "AGL_TASK": "not this"})
    told = await environment_of(workbench, agent, resources={"llm": llm})
    assert (told["OPENAI_MODEL"], told["AGL_TASK"]) == ("mine", '"task"')


async def test_a_task_too_long_for_the_environment_is_in_a_file(workbench: Workbench) -> None:
    code = (
        "import json, os, sys; task = json.load(sys.stdin); "
        "assert json.load(open(os.environ['AGL_TASK_FILE'])) == task; print(len(task))"
    )

    outcome = await workbench.run(python(code, reward_from="none"), "x" * 3_000_000)

    assert (outcome.error, outcome.text("stdout")) == (None, "3000000\n")


@pytest.mark.parametrize(
    ("stdin", "task", "expected"),
    [("json", "hé", '"hé"'), ("text", "hé", "hé"), ("text", [1], "[1]"), ("none", "hé", "")],
)
async def test_formats_of_stdin(workbench: Workbench, stdin: Any, task: Any, expected: str) -> None:
    outcome = await workbench.run(shell("cat", stdin=stdin, reward_from="none"), task)
    assert outcome.text("stdout") == expected


# ---------------------------------------------------------------------- what it says


async def test_the_span_of_the_command_has_code_and_duration(workbench: Workbench) -> None:
    outcome = await workbench.run(shell("exit 3"))
    span = outcome.span("agentlightning.operation")

    assert span.attributes["agentlightning.operation.output.exit_code"] == 3
    assert span.attributes["agentlightning.operation.output.duration_seconds"] > 0  # type: ignore[operator]
    assert list(span.attributes["agentlightning.operation.input.command"]) == ["sh", "-c", "exit 3"]  # type: ignore[arg-type]
    assert outcome.span("command.stdout").parent_id == span.span_id


async def test_a_code_other_than_zero_fails_the_rollout_with_the_end_of_stderr(workbench: Workbench) -> None:
    outcome = await workbench.run(shell("seq 1 100 >&2; echo 1; exit 3"))

    assert (outcome.attempt.status, outcome.reward) == ("failed", None)
    assert "ended with exit code 3" in outcome.message
    assert outcome.message.endswith("\n98\n99\n100")
    assert "\n90\n" not in outcome.message


async def test_a_program_ended_by_a_signal_is_named_so(workbench: Workbench) -> None:
    outcome = await workbench.run(shell("kill -SEGV $$"))
    assert "was ended by the signal SIGSEGV. It wrote nothing to stderr." in outcome.message


async def test_megabytes_of_output_are_cut_in_the_middle(workbench: Workbench) -> None:
    code = (
        "import sys; [sys.stdout.write('é' * 500_000) for _ in range(8)]; "
        "sys.stderr.write('e' * 5_000_000); print('\\n7')"
    )

    outcome = await workbench.run(python(code))
    span = outcome.span("command.stdout")

    assert (outcome.error, outcome.reward) == (None, 7.0)
    assert span.attributes["agentlightning.command.bytes"] == 8_000_003
    text = outcome.text("stdout")
    assert (text[:2], text[-5:]) == ("éé", "éé\n7\n")
    assert "�" not in text
    assert f"[… {8_000_003 - 65_536} bytes are left out here …]" in text
    assert len(outcome.text("stderr")) < 70_000


async def test_secrets_are_in_no_span_and_no_message(workbench: Workbench, llm: LLM) -> None:
    agent = shell("env; env >&2; exit 1 # of-the-user", env={"DATABASE_PASSWORD": "of-the-user", "COLOUR": "visible"})

    outcome = await workbench.run(
        agent, resources={"llm": llm, "other/llm": LLM(**{**llm.model_dump(), "api_key": "sk-of-another"})}
    )
    written = json.dumps([span.model_dump(mode="json") for span in outcome.spans]) + outcome.message
    written += str(outcome.attempt.metadata)

    assert "COLOUR=visible" in written
    assert [s for s in ("sk-very-secret", "of-the-user", "sk-of-another") if s in written] == []


# ---------------------------------------------------------------------- its reward


@pytest.mark.parametrize(
    ("script", "source", "expected"),
    [
        ("echo 0.5", "auto", 0.5),
        ("echo -1e-2", "auto", -0.01),
        ("echo 1; echo; echo '  '", "auto", 1.0),
        ("""printf '{"reward": 2, "why": "good"}'""", "auto", 2.0),
        ("""echo '{"reward": true}'""", "stdout", 1.0),
        ("echo done", "auto", None),
        ("echo '[1]'", "auto", None),
        ("echo 1_0", "auto", None),
        ("echo '{\"score\": 1}'", "auto", None),
        ("true", "auto", None),
        ("echo 0.5; echo 0.9 > $AGL_REWARD_FILE", "auto", 0.9),
        ("""printf '{\n"reward": 3\n}' > $AGL_REWARD_FILE""", "file", 3.0),
        ("echo 1 > $AGL_REWARD_FILE; echo 4 >> $AGL_REWARD_FILE", "file", 4.0),
        ("echo 0.5; echo 0.9 > $AGL_REWARD_FILE", "stdout", 0.5),
        ("rm $AGL_REWARD_FILE; echo 6", "auto", 6.0),
        ("rm $AGL_REWARD_FILE; mkfifo $AGL_REWARD_FILE; echo 6", "auto", 6.0),
        ("echo 0.5", "none", None),
        ("echo 0.5", "exit_code", 1.0),
        ("echo 0.5; exit 7", "exit_code", 0.0),
        ("kill -9 $$", "exit_code", 0.0),
    ],
)
async def test_rewards(workbench: Workbench, script: str, source: Any, expected: float | None) -> None:
    outcome = await workbench.run(shell(script, reward_from=source))
    assert (outcome.error, outcome.reward) == (None, expected)


@pytest.mark.parametrize(
    ("script", "source", "message"),
    [
        ("echo done", "stdout", "The last line of stdout must be a number .* it is 'done'"),
        ("true", "stdout", "it is empty"),
        ("echo 1", "file", "The reward file must be a number .* it is empty"),
        ("echo good > $AGL_REWARD_FILE", "auto", "The reward file must be a number .* it is 'good"),
        ("echo nan", "auto", "gives the reward nan; a reward must be finite"),
        ("echo 1e999", "auto", "a reward must be finite"),
        ("""echo '{"reward": "high"}'""", "auto", "gives the reward 'high', which is not a number"),
        ("""echo '{"reward": NaN}'""", "auto", "a reward must be finite"),
    ],
)
async def test_rewards_that_are_none(workbench: Workbench, script: str, source: Any, message: str) -> None:
    outcome = await workbench.run(shell(script, reward_from=source))
    assert (outcome.attempt.status, outcome.reward) == ("failed", None)
    with pytest.raises(RuntimeError, match=message):
        raise outcome.error or AssertionError


# ---------------------------------------------------------------------- wrong use


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "python agent.py",
            r"instead of 'python agent.py' give \['python', 'agent.py'\] or.*\['sh', '-c', 'python agent.py'\]",
        ),
        ("echo 'open", "takes a list of words"),
        ([], "must be a list of words"),
        (["python", 3], "must be a list of words"),
        (None, "must be a list of words"),
    ],
)
def test_a_command_is_a_list_of_words(command: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CommandAgent(command)


@pytest.mark.parametrize(
    "options", [{"reward_from": "stderr"}, {"stdin": "xml"}, {"timeout_seconds": 0}, {"env": {"PORT": 8080}}]
)
def test_options_that_do_not_exist_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        CommandAgent(["true"], **options)


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (["no-such-program"], {}, "There is no program 'no-such-program' on the PATH"),
        (["./nothing.sh"], {}, "There is no program './nothing.sh'"),
        (["true"], {"cwd": "/no/such/folder"}, "cannot run in '/no/such/folder', which is not a folder"),
        (["/etc/passwd"], {}, r"'/etc/passwd' may not be executed: chmod \+x"),
        (["a\0b"], {}, "could not be started: .*null"),
    ],
)
async def test_a_program_that_cannot_start_says_why(
    workbench: Workbench, command: list[str], options: Any, message: str
) -> None:
    outcome = await workbench.run(CommandAgent(command, **options))
    assert outcome.attempt.status == "failed"
    with pytest.raises(ConfigurationError, match=message):
        raise outcome.error or AssertionError


async def test_a_task_that_json_cannot_hold_is_refused(workbench: Workbench) -> None:
    rollout = await workbench.store.start_rollout("task")
    with pytest.raises(RuntimeError, match="The task cannot be given to a program"):
        await CommandAgent(["true"]).rollout_async(object(), {}, rollout)


async def test_without_an_attempt_there_is_nothing_to_run_for() -> None:
    with pytest.raises(ConfigurationError, match="a Rollout has none"):
        await CommandAgent(["true"]).rollout_async("task", {}, Rollout(rollout_id="r", input=1, start_time=0))
