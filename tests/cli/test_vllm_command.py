"""`agl vllm`: vLLM is not here; a package and an executable of its shape are, which write down how they were called."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli.vllm import _as_vllm_takes
from tests import warm_python

ROOT = Path(__file__).parents[2]
PACKAGE = {
    "vllm/__init__.py": "__version__ = '0.9.0'\n",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/openai/__init__.py": "",
    "vllm/entrypoints/openai/protocol.py": """
from pydantic import BaseModel

class ChatCompletionResponse(BaseModel):
    id: str
""",
    "vllm/entrypoints/openai/serving_chat.py": """
from vllm.entrypoints.openai.protocol import ChatCompletionResponse

class OpenAIServingChat:
    async def chat_completion_full_generator(self, request, result_generator, *args, **kwargs):
        return ChatCompletionResponse(id="1")
""",
    "vllm/entrypoints/cli/__init__.py": "",
    "vllm/entrypoints/cli/main.py": """
import json, os, sys

def main():
    from vllm.entrypoints.openai import serving_chat
    called = {"argv": sys.argv, "response": serving_chat.ChatCompletionResponse.__name__}
    open(os.environ["CALLED"], "w").write(json.dumps(called))
    leave = os.environ.get("LEAVE")
    if leave:
        sys.exit(int(leave) if leave.isdigit() else leave)
""",
}
EXECUTABLE = """#!/bin/sh
printf '%s\\n' "$0" "$@" > "$CALLED"
exit 7
"""


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm_python.run(
        [sys.executable, "-m", "agentlightning.cli", "vllm", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
            "CALLED": str(folder / "called"),
            **environment,
        },
        timeout=60,
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder to import vLLM from."""
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def called(folder: Path) -> Any:
    return json.loads((folder / "called").read_text())


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("serve m --port 1", "serve m --port 1"),
        ("--model m --port 1", "serve m --port 1"),
        ("--port 1 --model=m/n --seed 2", "serve m/n --port 1 --seed 2"),
        ("serve --port 1 --model m", "serve m --port 1"),
        ("serve m --model-impl x", "serve m --model-impl x"),
        ("--port 1", "serve --port 1"),
        ("serve --help", "serve --help"),
        ("bench latency --model m", "bench latency --model m"),
        ("--version", "--version"),
    ],
)
@pytest.mark.claim(455, 456)
def test_vllm_gets_its_arguments_as_it_takes_them(given: str, taken: str) -> None:
    assert _as_vllm_takes(given.split()) == taken.split()


@pytest.mark.claim(455, 456)
def test_vllm_is_taught_to_return_token_ids_before_it_starts(installed: Path) -> None:
    done = run(installed, "--model", "m", "--port", "1")

    assert (done.returncode, done.stderr) == (0, "")
    assert called(installed) == {
        "argv": ["vllm", "serve", "m", "--port", "1"],
        "response": "ChatCompletionResponsePatched",
    }


@pytest.mark.parametrize(("leaving", "code", "said"), [("3", 3, ""), ("no GPU", 1, "no GPU\n")])
def test_exit_code_is_that_of_vllm(installed: Path, leaving: str, code: int, said: str) -> None:
    done = run(installed, "serve", "m", LEAVE=leaving)

    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.claim(455, 456)
def test_executable_of_another_environment_is_run_as_it_is(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text(EXECUTABLE)
    program.chmod(0o755)

    done = run(tmp_path, "--model", "m", "--port", "1", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    assert done.returncode == 7
    assert (tmp_path / "called").read_text().split()[1:] == ["serve", "m", "--port", "1"]
    assert "vLLM 0.10.2 or later" in done.stderr


def test_vllm_without_a_command_line_is_told(installed: Path) -> None:
    (installed / "vllm/entrypoints/cli/main.py").unlink()

    done = run(installed, "serve", "m")

    assert done.returncode == 1
    assert "pip install -U vllm" in done.stderr


# ---------------------------------------------------------------------- a server for a training


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    return tmp_path


def test_model_is_served_with_what_training_needs(installed: Path, model: Path) -> None:
    (installed / "vllm/entrypoints/cli/main.py").write_text(
        "import json, os, sys\n"
        "open(os.environ['CALLED'], 'w').write(json.dumps({'argv': sys.argv, 'key': os.environ['VLLM_API_KEY']}))\n"
    )

    done = run(installed, "./m", "--port", "8123", "--lora-rank", "8", "--", "--seed", "7")

    words = called(installed)["argv"][1:]
    assert done.returncode == 0
    assert words[:2] == ["serve", "./m"]
    assert words[words.index("--port") + 1] == "8123"
    assert words[words.index("--max-lora-rank") + 1] == "8"
    assert words[-2:] == ["--seed", "7"]
    assert f"export VLLM_API_KEY={called(installed)['key']}" in done.stderr
    assert 'GRPO("./m", engine="http://127.0.0.1:8123", lora=LoraOptions(rank=8))' in done.stderr


def test_key_of_the_environment_is_used_and_not_shown(installed: Path, model: Path) -> None:
    (installed / "vllm/entrypoints/cli/main.py").write_text(
        "import os; open(os.environ['CALLED'], 'w').write(os.environ['VLLM_API_KEY'])\n"
    )

    done = run(installed, "./m", "--sleep", VLLM_API_KEY="given")

    assert (installed / "called").read_text() == "given"
    assert "given" not in done.stderr
    assert 'VllmOptions(address="http://127.0.0.1:8000", sleep=True)' in done.stderr


def test_command_can_be_shown_without_vllm_and_without_its_key(tmp_path: Path) -> None:
    done = run(tmp_path, "./m", "--print", "--max-length", "2048", VLLM_API_KEY="secret")

    assert done.returncode == 0
    assert "VLLM_SERVER_DEV_MODE=1 \\\n" in done.stdout
    assert "serve ./m --served-model-name policy --host 127.0.0.1 --port 8000" in done.stdout
    assert "--max-model-len 2048" in done.stdout
    assert "secret" not in done.stdout


def test_server_for_another_machine_takes_weights_by_nccl_and_unpickles_nothing(installed: Path, model: Path) -> None:
    (installed / "vllm/entrypoints/cli/main.py").write_text(
        "import json, os, sys\n"
        "open(os.environ['CALLED'], 'w').write(json.dumps({'argv': sys.argv, 'env': list(os.environ)}))\n"
    )

    done = run(installed, "./m", "--host", "0.0.0.0", "--transfer", "nccl")

    words, variables = called(installed)["argv"], called(installed)["env"]
    assert words[words.index("--host") + 1] == "0.0.0.0"
    assert words[words.index("--weight-transfer-config") + 1] == '{"backend":"nccl"}'
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in variables
    assert 'GRPO("./m", engine="http://THIS-MACHINE:8000")' in done.stderr
