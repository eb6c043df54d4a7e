"""The options of vLLM, the command that starts a server, and what stands before its routes."""

import re
from pathlib import Path
from typing import Any

import pytest

from agentlightning.engine.embedded import engine_choice
from agentlightning.engine.vllm import VllmOptions
from agentlightning.engine.vllm.options import KeyMiddleware, ServerCommand
from agentlightning.errors import ConfigurationError


def words(lora_rank: int | None = None, **options: Any) -> list[str]:
    command = ServerCommand(
        model="/models/m", name="policy", port=8000, lora_rank=lora_rank, options=VllmOptions(**options)
    )
    return command.words()


def value_of(found: list[str], option: str) -> str:
    return found[found.index(option) + 1]


def test_extra_has_ray_which_vllm_imports_for_weights_in_gpu_memory_and_does_not_require() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (extra,) = re.findall(r"^vllm = (.*)$", project, re.MULTILINE)

    assert "[ray]" in extra


def test_server_is_started_with_what_training_needs() -> None:
    found = words()

    assert found[1:7] == ["-m", "vllm.entrypoints.cli.main", "serve", "/models/m", "--served-model-name", "policy"]
    assert value_of(found, "--host") == "127.0.0.1"
    assert value_of(found, "--logprobs-mode") == "processed_logprobs"
    assert value_of(found, "--generation-config") == "vllm"
    assert value_of(found, "--weight-transfer-config") == '{"backend":"ipc"}'
    assert value_of(found, "--middleware") == "agentlightning.engine.vllm.options.KeyMiddleware"
    assert value_of(found, "--max-num-seqs") == "64"
    assert "--enable-sleep-mode" not in found


@pytest.mark.parametrize(("cpus", "servers"), [(None, "1"), (2, "1"), (8, "2"), (16, "4"), (128, "4")])
def test_answers_are_written_by_as_many_processes_as_the_machine_has_room_for(
    monkeypatch: pytest.MonkeyPatch, cpus: int | None, servers: str
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cpus)

    assert value_of(words(), "--api-server-count") == servers
    assert "--api-server-count" not in words(lora_rank=8), "only one of them would load the adapters"
    assert words(arguments=("--api-server-count", "7"))[-1] == "7"


@pytest.mark.parametrize(("rank", "served"), [(1, "1"), (4, "8"), (16, "16"), (200, "256")])
def test_server_for_adapters_takes_no_full_weights(rank: int, served: str) -> None:
    found = words(lora_rank=rank)

    assert "--enable-lora" in found
    assert value_of(found, "--max-lora-rank") == served
    assert "--weight-transfer-config" not in found
    with pytest.raises(ConfigurationError, match="up to rank 512; the rank is 1000"):
        words(lora_rank=1000)


def test_options_become_arguments_and_the_users_own_come_last() -> None:
    found = words(sleep=True, max_model_length=2048, gpu_memory_utilization=0.25, arguments=("--enforce-eager",))

    assert "--enable-sleep-mode" in found
    assert value_of(found, "--max-model-len") == "2048"
    assert value_of(found, "--gpu-memory-utilization") == "0.25"
    assert found[-1] == "--enforce-eager"


@pytest.mark.parametrize(
    ("options", "backend", "visible", "share"),
    [
        ({}, "ipc", None, None),
        ({"transfer": "nccl"}, "nccl", None, None),
        ({"gpus": (1,)}, "nccl", "1", None),
        ({"gpus": (2, 3)}, "nccl", "2,3", "2"),
        ({"gpus": (1,), "transfer": "folder"}, "ipc", "1", None),
    ],
    ids=["the learner's GPU", "nccl", "another GPU", "two others", "files"],
)
def test_server_on_other_gpus_takes_weights_by_nccl_and_unpickles_nothing(
    options: dict[str, Any], backend: str, visible: str | None, share: str | None
) -> None:
    command = ServerCommand(model="/models/m", name="policy", port=8000, options=VllmOptions(**options))
    found, variables = command.words(), command.variables()

    assert value_of(found, "--weight-transfer-config") == f'{{"backend":"{backend}"}}'
    assert variables.get("CUDA_VISIBLE_DEVICES") == visible
    assert ("VLLM_ALLOW_INSECURE_SERIALIZATION" in variables) == (backend == "ipc")
    assert (value_of(found, "--tensor-parallel-size") if "--tensor-parallel-size" in found else None) == share


def test_key_is_in_the_environment_and_not_in_the_command() -> None:
    command = ServerCommand(model="/models/m", name="policy", port=1, options=VllmOptions(api_key="secret"))

    assert command.environment("secret")["VLLM_API_KEY"] == "secret"
    assert command.environment("secret")["VLLM_SERVER_DEV_MODE"] == "1"
    assert "secret" not in " ".join(command.words())
    assert "secret" not in repr(command)
    assert "secret" not in repr(command.variables())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"transfer": "pigeon"}, "transfer is 'pigeon'; it must be one of 'auto', 'ipc', 'nccl', 'folder'"),
        ({"gpu_memory_utilization": 40}, "must be above 0 and at most 1"),
        ({"arguments": "--enforce-eager --seed 1"}, r"give one text for each: \['--enforce-eager', '--seed', '1'\]"),
        ({"address": "localhost:8000"}, "'localhost:8000' is not the address of a vLLM"),
        ({"address": "http://h:1", "arguments": ("--seed", "1")}, "give its arguments to `agl vllm`"),
        ({"gpus": 1}, r"gpus is 1; give a list of the numbers of GPUs, such as \[1\]"),
        ({"gpus": ["cuda:1"]}, "give a list of the numbers"),
        ({"address": "http://h:1", "gpus": (1,)}, "has its GPUs already.*CUDA_VISIBLE_DEVICES"),
        ({"transfer": "ipc", "gpus": (1,)}, "transfer='ipc' is for one GPU, and gpus names others"),
    ],
    ids=["transfer", "memory", "arguments", "address", "fixed arguments", "one GPU", "device", "fixed GPUs", "ipc"],
)
def test_options_that_cannot_be_used_are_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        VllmOptions(**options)


@pytest.mark.parametrize("address", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"])
def test_address_is_taken_with_and_without_the_version_of_the_interface(address: str) -> None:
    assert VllmOptions(address=address).root == "http://h:8000"


# ---------------------------------------------------------------------- the choice of an engine


def test_engines_are_known_by_name_and_address() -> None:
    class Own:
        def create(self, request: Any) -> Any: ...

    own = Own()

    assert engine_choice("embedded") is None
    assert engine_choice("vllm") == VllmOptions()
    assert engine_choice("http://h:8000") == VllmOptions(address="http://h:8000")
    assert engine_choice(own) is own


@pytest.mark.parametrize("engine", ["vLLM", "sglang", "localhost:8000", 3], ids=str)
def test_engine_that_is_not_known_is_refused_with_those_that_are(engine: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"must be 'embedded', 'vllm', the address of a running vLLM"):
        engine_choice(engine)


# ---------------------------------------------------------------------- the key


@pytest.mark.parametrize(
    ("path", "shown", "status"),
    [
        ("/update_weights", None, 401),
        ("/update_weights", b"Bearer wrong", 401),
        ("/update_weights", "Bearer ümlaut".encode(), 401),
        ("/update_weights", b"Bearer right", 200),
        ("/v1/chat/completions", None, 401),
        ("/health", None, 200),
        ("/health/../update_weights", None, 401),
    ],
)
async def test_every_route_but_that_for_health_takes_the_key(
    path: str, shown: bytes | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "right")
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if shown is None else [(b"authorization", shown)]
    await KeyMiddleware(app)({"type": "http", "path": path, "headers": headers, "method": "POST"}, None, send)

    assert sent[0]["status"] == status


def test_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    with pytest.raises(RuntimeError, match="everybody could change"):
        KeyMiddleware(None)
