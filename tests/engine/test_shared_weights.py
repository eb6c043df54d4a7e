"""Weights that a trainer shares with the embedded engine in GPU memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("numpy", reason="safetensors writes through NumPy")

from agentlightning.engine.checkpoint import load  # noqa: E402
from agentlightning.engine.embedded import EngineServer  # noqa: E402
from agentlightning.engine.tiny.model import TinyModel, TinyShape, save_tiny  # noqa: E402
from agentlightning.engine.weights import (  # noqa: E402
    PublishedWeights,  # after the check for torch
    RoundedCopy,
    SharedReader,
    WeightsBlock,
    gpu_of,
)
from agentlightning.errors import EngineError, InvalidRequest  # noqa: E402
from tests.engine.small_llama import save_small_llama, word_tokenizer  # noqa: E402

ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
on_a_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
DESCRIPTION: dict[str, Any] = {"gpu": "another", "dtype": "float32", "handle": [], "places": {"a": [0, [2, 3]]}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no JSON", "Invalid JSON"),
        (json.dumps(DESCRIPTION | {"dtype": "load"}), "dtype"),
        (json.dumps(DESCRIPTION | {"places": {"a": [-1, [2]]}}), "places"),
        (json.dumps(DESCRIPTION | {"handle": [{"code": 1}]}), "handle"),
        (json.dumps(DESCRIPTION), "lie on the GPU 'another', and this engine is on 'None'"),
    ],
    ids=["no JSON", "another dtype", "before the block", "no handle", "another GPU"],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "weights.shared.json"
    path.write_text(text)

    with pytest.raises(InvalidRequest, match=reason):
        SharedReader().read(path, torch.device("cpu"))


def a_model(seed: int, device: str) -> TinyModel:
    torch.manual_seed(seed)
    return TinyModel(TinyShape(max_length=256)).to(device)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EngineServer]:
    save_tiny(a_model(0, "cpu"), tmp_path / "tiny")
    with EngineServer(str(tmp_path / "tiny"), device="cuda") as server:
        yield server


def answer(server: EngineServer) -> str:
    """The likeliest one, by which weights are told from others."""
    body = {"messages": [{"role": "user", "content": "37+58?"}], "temperature": 0, "max_tokens": 24}
    headers = {"Authorization": f"Bearer {server.api_key}"}
    response = httpx.post(f"{server.address}/chat/completions", json=body, headers=headers, timeout=60)
    return str(response.json()["choices"][0]["message"]["content"])


@on_a_gpu
def test_they_are_the_ones_that_a_file_would_bring(server: EngineServer, device: str) -> None:
    models = [a_model(seed, device) for seed in (1, 2)]
    shared = []
    for version, model in enumerate(models, start=1):
        server.publish(version, PublishedWeights(model, seed=0))
        shared.append(answer(server))
    block, server._shares_gpu = server._block, False
    by_file = []
    for version, model in enumerate(models, start=3):
        server.publish(version, PublishedWeights(model, seed=0))
        by_file.append(answer(server))

    assert block is not None, "the weights went through the shared block"
    assert shared == by_file
    assert shared[0] != shared[1]
    assert server.status()["engine"]["weights_version"] == 4


@on_a_gpu
@pytest.mark.parametrize("change", ["beyond the block", "another handle", "cut handle"])
def test_memory_that_cannot_be_read_is_refused(server: EngineServer, device: str, change: str, tmp_path: Path) -> None:
    where = torch.device(device, 0)
    block = WeightsBlock({"a": (2, 3)}, torch.float32, where)
    path = tmp_path / "weights.shared.json"
    block.describe(path)
    described = json.loads(path.read_text())
    assert described["gpu"] == gpu_of(where)
    if change == "beyond the block":
        described["places"]["a"] = [2**40, [2, 3]]
    else:
        described["handle"] = ["AAAA", *described["handle"][1:]] if change == "another handle" else [0]
        described["handle"][1:2] = ["AAAA"]
    path.write_text(json.dumps(described))
    mine = server._folders[0] / path.name
    mine.write_text(path.read_text())

    with pytest.raises(EngineError, match="cannot be read"):
        server._request("POST", "/agl/weights", {"version": 5, "path": str(mine)}, key=server._weights_key)

    assert server.status()["engine"]["weights_version"] == 0


@on_a_gpu
def test_the_engine_gets_the_copy_that_the_learner_computes_with(tmp_path: Path, device: str) -> None:
    pytest.importorskip("transformers", reason="Hugging Face models need transformers: the extra hf")
    folder = str(save_small_llama(tmp_path / "llama", word_tokenizer(), dtype="bfloat16"))
    model: Any = load(folder, device=device, dtype="float32")[0]
    copy = RoundedCopy(model.network, torch.bfloat16)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.trainable().values():
            weight.add_(0.3 * torch.randn_like(weight))
    answers = []

    with EngineServer(folder, device=device) as server:
        before = answer(server)
        for version, server._shares_gpu in ((1, True), (2, False)):
            server.publish(version, PublishedWeights(model, seed=0, copy=copy))
            answers.append(answer(server))
            assert server._block is copy._block

    assert answers[0] == answers[1] != before
