"""Weights on their way to an engine: whole, fitting, or refused with the old ones kept."""

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("safetensors", reason="weights travel as safetensors")
pytest.importorskip("numpy", reason="safetensors writes through NumPy")

from agentlightning.engine.sampling import Sampling  # noqa: E402
from agentlightning.engine.scheduler import InferenceEngine  # noqa: E402
from agentlightning.engine.tiny.model import TinyModel, TinyShape  # noqa: E402
from agentlightning.engine.weights import read_weights, write_weights  # noqa: E402
from agentlightning.errors import EngineError  # noqa: E402
from tests.engine.scripted import PATIENCE_SECONDS  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def weights(seed: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    return TinyModel(TinyShape(max_length=64)).state()


def test_a_file_that_is_missing_or_cut_short_is_an_error_in_words(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    with pytest.raises(EngineError, match="no file of weights"):
        read_weights(path)
    write_weights(path, weights())
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(EngineError, match="cannot be read"):
        read_weights(path)


def spoiled(kind: str) -> dict[str, Any]:
    tensors = weights()
    if kind == "missing":
        del tensors["final_norm"]
    elif kind == "unknown":
        tensors["more"] = torch.zeros(1)
    elif kind == "shape":
        tensors["final_norm"] = torch.zeros(3)
    elif kind == "not finite":
        tensors["final_norm"] = tensors["final_norm"] * float("nan")
    return tensors


@pytest.mark.parametrize("kind", ["missing", "unknown", "shape", "not finite"])
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(kind: str) -> None:
    with InferenceEngine(TinyModel(TinyShape(max_length=64))) as engine:
        engine.load_weights(1, weights()).result(PATIENCE_SECONDS)
        before = engine.submit([20], Sampling(temperature=0, max_new_tokens=9)).result(PATIENCE_SECONDS)

        with pytest.raises(EngineError, match="weights"):
            engine.load_weights(2, spoiled(kind)).result(PATIENCE_SECONDS)

        after = engine.submit([20], Sampling(temperature=0, max_new_tokens=9)).result(PATIENCE_SECONDS)
        assert (after.token_ids, after.logprobs, after.weights_version) == (before.token_ids, before.logprobs, 1)


def test_loads_under_way_drop_no_call() -> None:
    tensors = [weights(seed) for seed in range(4)]
    outcomes: list[Any] = []
    is_over = threading.Event()

    with InferenceEngine(TinyModel(TinyShape(max_length=64)), max_sequences=8) as engine:

        def call() -> None:
            while not is_over.is_set():
                futures = [engine.submit([20, 21, 22], Sampling(max_new_tokens=5)) for _ in range(12)]
                outcomes.extend(future.result(PATIENCE_SECONDS) for future in futures)

        caller = threading.Thread(target=call)
        caller.start()
        for version in range(1, 61):
            engine.load_weights(version, tensors[version % 4]).result(PATIENCE_SECONDS)
        is_over.set()
        caller.join(PATIENCE_SECONDS)

        assert not caller.is_alive()
        assert engine.statistics()["weights_loads"] == 60
        assert engine.statistics()["failed"] == 0
        versions = [outcome.weights_version for outcome in outcomes]
        assert versions
        assert max(versions) <= 60
