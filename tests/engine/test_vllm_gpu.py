"""A real vLLM on a real GPU: AGL_TEST_MODEL=FOLDER python -m pytest -m gpu tests/engine/test_vllm_gpu.py"""

import importlib.util
import math
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from agentlightning.engine.base import EngineRequest  # noqa: E402 # after the check for torch
from agentlightning.engine.checkpoint import load  # noqa: E402
from agentlightning.engine.model import LoraOptions, logits_of  # noqa: E402
from agentlightning.engine.vllm import VllmOptions  # noqa: E402
from agentlightning.engine.vllm.engine import VllmClient  # noqa: E402
from agentlightning.engine.weights import PublishedWeights  # noqa: E402
from agentlightning.errors import EngineError  # noqa: E402

FOLDER = os.environ.get("AGL_TEST_MODEL", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (FOLDER and torch.cuda.is_available() and importlib.util.find_spec("vllm")),
        reason="needs a GPU, vLLM, and the folder of a model in AGL_TEST_MODEL",
    ),
]
AGREEMENT = 0.05
"""Mean difference of log-probabilities between the engine and the learner."""


@contextmanager
def serving(lora: LoraOptions | None = None, **options: Any) -> Iterator[Any]:
    choice = VllmOptions(gpu_memory_utilization=0.2, max_model_length=2048, **options)
    engine = choice.create(EngineRequest(source=FOLDER, name="policy", lora=lora))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def answer(engine: Any, temperature: float = 1.0) -> Any:
    """Token ids of prompt and answer, and the log-probabilities of the answer."""
    entry = engine.model_config()["litellm_params"]
    client = VllmClient(entry["api_base"].removesuffix("/v1"), entry["api_key"])
    body = {
        "model": entry["model"].removeprefix("hosted_vllm/"),
        "messages": [{"role": "user", "content": "Tell a long story about a fox and a river."}],
        "max_tokens": 128,
        "temperature": temperature,
        "seed": 1,
        "logprobs": True,
        "return_token_ids": True,
    }
    whole = client.post("/v1/chat/completions", body)
    choice = whole["choices"][0]
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    return whole["prompt_token_ids"], choice["token_ids"], logprobs


def difference(engine: Any, model: Any, temperature: float = 1.0) -> float:
    """Between the log-probabilities that the engine reports and the learner's."""
    prompt, chosen, reported = answer(engine, temperature)
    ids = torch.tensor([prompt + chosen], device=model.device)
    selected = torch.zeros_like(ids, dtype=torch.bool)
    selected[0, len(prompt) - 1 : -1] = True
    with torch.no_grad():
        logits = (
            logits_of(model, ids, torch.tensor([ids.shape[1]], device=model.device), selected).float() / temperature
        )
    own = torch.log_softmax(logits, dim=-1)[range(len(chosen)), chosen].tolist()
    return statistics.mean(abs(left - right) for left, right in zip(own, reported, strict=True))


def disturb(model: Any, share: float) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.trainable().values():
            weight.add_(torch.randn_like(weight) * weight.std().nan_to_num(0.0).clamp(min=1e-3) * share)


def test_full_weights_reach_vllm_through_gpu_memory_and_come_back() -> None:
    with serving(sleep=True) as engine:
        model, _ = load(FOLDER, device="cuda", dtype="float32")
        engine.publish(0, PublishedWeights(model, seed=0))
        assert difference(engine, model) < AGREEMENT
        assert difference(engine, model, temperature=0.5) < 2 * AGREEMENT, "log-probabilities are processed"
        before = answer(engine)

        disturb(model, 0.05)
        stale = difference(engine, model)
        engine.publish(1, PublishedWeights(model, seed=0))
        fresh = difference(engine, model)
        free = torch.cuda.mem_get_info()[0]
        engine.sleep()
        freed = torch.cuda.mem_get_info()[0] - free
        engine.wake()

        assert fresh < AGREEMENT < stale
        assert type(engine._transfer).__name__ == "IpcTransfer"
        assert answer(engine)[1] != before[1]
        assert freed > 1e9
        assert engine.model_config()["model_info"] == {"version": 1}


def test_full_weights_reach_vllm_by_nccl_and_a_refused_update_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "server")  # NCCL takes two processes on one GPU only for two machines
    with serving(transfer="nccl") as engine:
        monkeypatch.setenv("NCCL_HOSTID", "learner")
        model, _ = load(FOLDER, device="cuda", dtype="float32")
        engine.publish(0, PublishedWeights(model, seed=0))
        assert type(engine._transfer).__name__ == "NcclTransfer"
        assert difference(engine, model) < AGREEMENT

        disturb(model, 0.05)
        stale = difference(engine, model)
        engine.publish(1, PublishedWeights(model, seed=0))
        assert difference(engine, model) < AGREEMENT < stale

        class Unknown(PublishedWeights):
            def tensors(self, dtype: Any) -> Iterator[tuple[str, Any]]:
                yield "no.such.weight", torch.ones(8, device="cuda", dtype=dtype)

        with pytest.raises(EngineError):
            engine.publish(2, Unknown(model, seed=0))
        disturb(model, 0.05)
        engine.publish(3, PublishedWeights(model, seed=0))
        assert difference(engine, model) < AGREEMENT


def test_adapters_reach_vllm_unmerged() -> None:
    lora = LoraOptions(rank=8)
    with serving(lora) as engine:
        model, _ = load(FOLDER, device="cuda", dtype="bfloat16", lora=lora)
        engine.publish(0, PublishedWeights(model, seed=0))
        assert difference(engine, model) < AGREEMENT

        disturb(model, 0.5)
        stale = difference(engine, model)
        for version in (1, 2, 3):
            engine.publish(version, PublishedWeights(model, seed=0))
        fresh = difference(engine, model)

        assert math.isfinite(stale)
        assert fresh < AGREEMENT
        assert fresh < stale
        assert engine.model_config()["litellm_params"]["model"] == "hosted_vllm/policy-v3"
