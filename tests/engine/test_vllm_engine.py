"""vLLM seen from training, over a server that behaves as vLLM was recorded to."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

torch = pytest.importorskip("torch", reason="the engine needs torch")

from agentlightning.engine.base import EngineRequest  # noqa: E402 # after the check for torch
from agentlightning.engine.checkpoint import load  # noqa: E402
from agentlightning.engine.model import AdapterWeights, LoraOptions  # noqa: E402
from agentlightning.engine.vllm import VllmOptions  # noqa: E402
from agentlightning.engine.vllm.engine import VllmClient, VllmEngine  # noqa: E402
from agentlightning.engine.vllm.transfer import IpcTransfer, NcclTransfer  # noqa: E402
from agentlightning.engine.weights import PublishedWeights  # noqa: E402
from agentlightning.errors import ConfigurationError, EngineError  # noqa: E402
from tests.engine.fake_vllm import GPU_ID, FakeVllm, fake_vllm, install_fake_vllm  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
REQUEST = EngineRequest(source="tiny", name="policy")
Join = Callable[..., VllmEngine]
UPDATE = ["POST /pause?mode=keep", "POST /collective_rpc", "POST /reset_prefix_cache?reset_running_requests=true"]


def changed_model() -> Any:
    """The tiny model with other weights."""
    model, _ = load("tiny")
    with torch.no_grad():
        for weight in model.trainable().values():
            weight.add_(0.125)
    return model


def weights_of(fake: FakeVllm) -> Any:
    return fake.app.engine.model.state()


def are_equal(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def publish_adapters(engine: VllmEngine, version: int) -> None:
    adapters = AdapterWeights({"lora_A.weight": torch.ones(2)}, {"r": 8})
    weights: Any = SimpleNamespace(device=torch.device("cpu"), adapters=lambda: adapters)
    engine.publish(version, weights)


@pytest.fixture
def join() -> Iterator[Join]:
    """Makes engines that have joined a server; they leave it at the end."""
    with ExitStack() as stack:

        def make(fake: FakeVllm, *, lora: LoraOptions | None = None, **options: Any) -> VllmEngine:
            request = EngineRequest(source="tiny", name="policy", lora=lora)
            engine = VllmEngine(request, VllmOptions(address=fake.url, **options))
            engine.start()
            stack.callback(engine.stop)
            fake.requests.clear()
            return engine

        yield make


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    with fake_vllm() as server:
        yield server


@pytest.fixture
def lora_fake() -> Iterator[FakeVllm]:
    with fake_vllm(has_lora=True, takes_weights=False) as server:
        yield server


# ---------------------------------------------------------------------- full weights


def test_published_weights_are_sampled_from_and_the_proxy_knows_their_version(join: Join, fake: FakeVllm) -> None:
    model = changed_model()
    engine = join(fake)
    assert "model_info" not in engine.model_config()

    engine.publish(3, PublishedWeights(model, seed=0))

    assert are_equal(weights_of(fake), model.state())
    assert fake.requests == [*UPDATE, "POST /resume"]
    entry = engine.model_config()
    assert entry["model_name"] == "policy"
    assert entry["litellm_params"] == {"model": "hosted_vllm/policy", "api_base": f"{fake.url}/v1"}
    assert entry["model_info"] == {"version": 3}


def test_weights_that_do_not_fit_are_an_error_and_calls_go_on(join: Join, fake: FakeVllm) -> None:
    engine = join(fake)
    before = weights_of(fake)

    wrong: Any = SimpleNamespace(device=torch.device("cpu"), tensors=lambda dtype: [("unknown", torch.ones(2))])

    with pytest.raises(EngineError):
        engine.publish(1, wrong)

    assert fake.requests[-1] == "POST /resume"
    assert not fake.is_paused
    assert are_equal(weights_of(fake), before)
    assert "model_info" not in engine.model_config()


def by_ipc(fake: FakeVllm, **options: Any) -> IpcTransfer:
    return IpcTransfer(VllmClient(fake.url, None), torch.float32, share=fake.share, gpu_id=GPU_ID, **options)


def test_weights_through_gpu_memory_arrive_in_parts_that_fit_the_buffer(fake: FakeVllm) -> None:
    model = changed_model()
    transfer = by_ipc(fake, buffer_bytes=max(tensor.nbytes for tensor in model.state().values()))

    transfer.send(model.state().items())
    transfer.send(model.state().items())

    assert are_equal(weights_of(fake), model.state())
    assert fake.requests.count("POST /update_weights") >= 4
    assert fake.requests.count("POST /start_weight_update") == 2
    assert len(fake.buffers) == 1, "the buffer is shared once, and used for every version"
    assert fake.requests[-2:] == ["POST /reset_prefix_cache?reset_running_requests=true", "POST /resume"]


def test_larger_weight_gets_a_larger_buffer(fake: FakeVllm) -> None:
    model = changed_model()

    by_ipc(fake, buffer_bytes=16).send(model.state().items())

    assert are_equal(weights_of(fake), model.state())


def test_update_that_fails_on_our_side_is_ended_so_that_the_next_can_begin(fake: FakeVllm) -> None:
    model = changed_model()
    transfer = by_ipc(fake)

    def broken() -> Iterator[tuple[str, Any]]:
        raise MemoryError("no room on the GPU")
        yield

    with pytest.raises(MemoryError):
        transfer.send(broken())
    assert not fake.is_paused

    transfer.send(model.state().items())
    assert are_equal(weights_of(fake), model.state())


@pytest.fixture
def nccl_fake() -> Iterator[FakeVllm]:
    with fake_vllm(transfer="nccl") as server:
        yield server


def by_nccl(fake: FakeVllm, connect: Any = None) -> NcclTransfer:
    client, cpu = VllmClient(fake.url, None), torch.device("cpu")
    return NcclTransfer(client, torch.float32, cpu, workers=2, connect=connect or fake.connect, part_bytes=100_000)


def test_weights_by_nccl_arrive_in_parts_over_one_group_with_the_learner_first(nccl_fake: FakeVllm) -> None:
    model = changed_model()
    met: list[Any] = []

    def connect(info: Any) -> Any:
        met.append(dict(info))
        return nccl_fake.connect(info)

    transfer = by_nccl(nccl_fake, connect)
    for version in (1, 2):
        transfer.publish(version, PublishedWeights(model, seed=0))

    assert are_equal(weights_of(nccl_fake), model.state())
    assert nccl_fake.requests.count("POST /update_weights") >= 4
    assert nccl_fake.requests.count("POST /init_weight_transfer_engine") == len(nccl_fake.groups) == 1
    assert nccl_fake.requests[-2:] == ["POST /reset_prefix_cache?reset_running_requests=true", "POST /resume"]
    transfer.close()
    assert nccl_fake.groups[0].is_destroyed
    assert met[0].pop("master_port") > 0
    assert met == [{"master_address": "127.0.0.1", "rank_offset": 1, "world_size": 3}]


def test_server_that_refuses_to_meet_is_an_error_though_the_learner_still_waits(nccl_fake: FakeVllm) -> None:
    nccl_fake.takes_weights = False
    refused = threading.Event()

    def wait_for_the_server(info: Any) -> Any:
        refused.wait(30)
        raise RuntimeError("nobody came")

    with pytest.raises(EngineError, match="not configured"):
        by_nccl(nccl_fake, wait_for_the_server).publish(1, PublishedWeights(changed_model(), seed=0))
    assert not refused.is_set()
    refused.set()


def test_group_that_nccl_does_not_form_is_an_error_in_words(nccl_fake: FakeVllm) -> None:
    def refuse(info: Any) -> Any:
        raise RuntimeError("NCCL error: invalid usage")

    with pytest.raises(EngineError, match=r"NCCL does not connect the learner with vLLM at http://.*invalid usage"):
        by_nccl(nccl_fake, refuse).publish(1, PublishedWeights(changed_model(), seed=0))


def test_weights_that_are_refused_by_nccl_are_an_error_and_the_next_update_forms_a_new_group(
    nccl_fake: FakeVllm,
) -> None:
    model = changed_model()
    transfer = by_nccl(nccl_fake)
    nccl_fake.refuses_weights = True

    with pytest.raises(EngineError, match="no such weight"):
        transfer.publish(1, PublishedWeights(model, seed=0))
    assert nccl_fake.groups[0].is_destroyed, "what is queued for the GPU would wait for ever"
    assert not nccl_fake.is_paused

    nccl_fake.refuses_weights = False
    transfer.publish(2, PublishedWeights(model, seed=0))
    assert are_equal(weights_of(nccl_fake), model.state())
    assert len(nccl_fake.groups) == 2


def test_learner_on_the_cpu_sends_a_folder_to_a_server_for_nccl(join: Join, nccl_fake: FakeVllm) -> None:
    model = changed_model()
    join(nccl_fake).publish(1, PublishedWeights(model, seed=0))

    assert are_equal(weights_of(nccl_fake), model.state())
    with pytest.raises(EngineError, match="transfer='nccl' needs a learner on a GPU, and it is on 'cpu'; use 'folder'"):
        join(nccl_fake, transfer="nccl").publish(1, PublishedWeights(model, seed=0))


def test_calls_in_flight_wait_for_the_end_of_an_update(fake: FakeVllm) -> None:
    client = VllmClient(fake.url, None)
    answers: list[Any] = []
    body = {"model": "policy", "messages": [{"role": "user", "content": "say 1"}], "max_tokens": 2}
    call = threading.Thread(target=lambda: answers.append(client.post("/v1/chat/completions", body)))

    with client.updating():
        call.start()
        call.join(0.3)
        assert answers == []

    call.join(30)
    assert "weights_version" not in answers[0]


# ---------------------------------------------------------------------- adapters


def test_adapters_are_loaded_under_a_name_for_each_version_and_old_ones_are_unloaded(
    join: Join, lora_fake: FakeVllm
) -> None:
    engine = join(lora_fake, lora=LoraOptions(rank=8))
    assert engine.model_config()["litellm_params"]["model"] == "hosted_vllm/policy"

    for version in range(4):
        publish_adapters(engine, version)

    assert list(lora_fake.adapters) == ["policy-v2", "policy-v3"]
    assert engine.model_config()["litellm_params"]["model"] == "hosted_vllm/policy-v3"
    assert engine.model_config()["model_info"] == {"version": 3}
    assert not any("pause" in line or "update" in line for line in lora_fake.requests)

    engine.stop()
    assert lora_fake.adapters == {}


def test_adapters_of_another_run_are_unloaded_first(join: Join, lora_fake: FakeVllm) -> None:
    lora_fake.adapters = {"policy-v0": "/gone", "policy-v7": "/gone", "other-v1": "/somebody/elses"}
    engine = join(lora_fake, lora=LoraOptions(rank=8))

    publish_adapters(engine, 0)

    assert sorted(lora_fake.adapters) == ["other-v1", "policy-v0"]
    assert "POST /reset_prefix_cache?reset_running_requests=true" in lora_fake.requests


def test_version_that_is_published_twice_replaces_the_first(join: Join, lora_fake: FakeVllm) -> None:
    engine = join(lora_fake, lora=LoraOptions(rank=8))
    with pytest.raises(EngineError, match="is trained whole"):
        engine.publish(1, PublishedWeights(changed_model(), seed=0))

    publish_adapters(engine, 1)
    publish_adapters(engine, 1)

    assert list(lora_fake.adapters) == ["policy-v1"]
    assert lora_fake.requests[-1] == "POST /reset_prefix_cache?reset_running_requests=true"


# ---------------------------------------------------------------------- servers that are joined


@pytest.mark.parametrize(
    ("server", "lora", "options", "words"),
    [
        ({"is_dev": False}, None, {}, "VLLM_SERVER_DEV_MODE=1"),
        ({"takes_weights": False}, None, {}, "no --weight-transfer-config"),
        ({"has_lora": True}, None, {}, "full weights would end it"),
        ({}, LoraOptions(rank=8), {}, "takes no adapters"),
        ({"has_lora": True, "max_lora_rank": 8}, LoraOptions(rank=16), {}, "up to rank 8, not 16"),
        ({"logprobs_mode": "raw_logprobs"}, None, {}, "gives raw_logprobs"),
        ({}, None, {"sleep": True}, "cannot sleep"),
        ({}, None, {"transfer": "nccl"}, "takes weights by ipc, not by nccl"),
        ({"transfer": "nccl"}, None, {"transfer": "ipc"}, "takes weights by nccl, not by ipc"),
    ],
    ids=["dev mode", "weight transfer", "adapters", "no adapters", "rank", "log-probabilities", "sleep", "ipc", "nccl"],
)
def test_server_that_cannot_be_trained_with_is_refused_with_the_command_that_starts_one(
    join: Join, server: dict[str, Any], lora: LoraOptions | None, options: dict[str, Any], words: str
) -> None:
    with fake_vllm(**server) as fake:
        with pytest.raises(EngineError, match="agl vllm tiny --name policy --port") as raised:
            join(fake, lora=lora, **options)

        assert words in str(raised.value)
        assert not fake.is_dead
        assert ("--lora-rank" in str(raised.value)) == (lora is not None)
        assert ("--transfer nccl" in str(raised.value)) == (options.get("transfer") == "nccl")


def test_address_without_a_server_is_refused_with_the_command_that_starts_one() -> None:
    engine = VllmEngine(REQUEST, VllmOptions(address="http://127.0.0.1:9"))

    with pytest.raises(
        EngineError, match=r"No vLLM answers at http://127\.0\.0\.1:9; .*agl vllm tiny --name policy --port 9"
    ):
        engine.start()


def test_key_is_read_from_the_environment_and_a_wrong_one_is_named(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_vllm(key="right") as fake:
        monkeypatch.setenv("VLLM_API_KEY", "right")
        assert join(fake).model_config()["litellm_params"]["api_key"] == "right"

        with pytest.raises(EngineError, match=r"refuses the key.*VLLM_API_KEY"):
            join(fake, api_key="wrong")


def test_server_that_another_training_left_paused_and_asleep_is_woken(join: Join) -> None:
    with fake_vllm(can_sleep=True) as fake:
        fake.is_paused = fake.is_asleep = True

        join(fake)

        assert (fake.is_paused, fake.is_asleep) == (False, False)


def test_joined_server_is_not_stopped_and_one_whose_engine_has_ended_is_not_running(join: Join, fake: FakeVllm) -> None:
    engine, other = join(fake), join(fake)
    assert engine.is_running()

    engine.stop()

    assert not engine.is_running()
    assert other.is_running()
    fake.is_dead = True
    assert not other.is_running()
    with pytest.raises(EngineError, match="has ended, or its engine has"):
        other.status()


def test_engine_sleeps_only_if_the_options_say_so_and_wakes_before_it_takes_weights(join: Join) -> None:
    with fake_vllm(can_sleep=True) as fake:
        engine = join(fake)
        engine.sleep()
        assert not fake.is_asleep

    with fake_vllm(can_sleep=True) as fake:
        engine = join(fake, sleep=True)
        engine.sleep()
        assert fake.is_asleep

        engine.publish(1, PublishedWeights(changed_model(), seed=0))

        assert not fake.is_asleep
        assert fake.requests == ["POST /sleep?level=1&mode=keep", "POST /wake_up", *UPDATE, "POST /resume"]


def test_methods_before_the_start_say_so() -> None:
    engine = VllmEngine(REQUEST, VllmOptions(address="http://127.0.0.1:9"))

    assert not engine.is_running()
    for call in (lambda: engine.address, engine.status, lambda: engine.publish(1, PublishedWeights(None, seed=0))):  # type: ignore[arg-type] # never read
        with pytest.raises(EngineError, match="not running; start it first"):
            call()
    engine.stop()


# ---------------------------------------------------------------------- servers of our own


@pytest.fixture
def tiny_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like one of Hugging Face's and holds the tiny model, and a vLLM that serves it."""
    from agentlightning.engine.tiny.model import save_tiny

    folder = tmp_path / "model"
    folder.mkdir()
    model: Any = load("tiny")[0]
    save_tiny(model, folder)
    (folder / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(str(install_fake_vllm(tmp_path / "site")))
    return folder


def owned(folder: Path, **options: Any) -> Any:
    return VllmOptions(**options).create(EngineRequest(source=str(folder), name="policy"))


def test_server_of_our_own_is_started_takes_weights_and_ends(tiny_folder: Path) -> None:
    model = changed_model()
    engine = owned(tiny_folder)

    engine.start()
    try:
        engine.publish(1, PublishedWeights(model, seed=0))
        assert engine.status()["weights_version"] == 1
        root = engine.address.removesuffix("/v1")
        assert requests.post(f"{root}/pause", timeout=10).status_code == 401, "routes for development take the key"
        assert requests.get(f"{root}/health", timeout=10).status_code == 200
    finally:
        engine.stop()

    with pytest.raises(requests.ConnectionError):
        requests.get(f"{root}/health", timeout=10)


def test_server_of_our_own_that_dies_shows_its_last_lines(tiny_folder: Path) -> None:
    engine = owned(tiny_folder)
    engine.start()
    try:
        client = VllmClient(engine.address.removesuffix("/v1"), engine.model_config()["litellm_params"]["api_key"])
        with pytest.raises(EngineError):
            client.post("/die")

        assert not engine.is_running()
        with pytest.raises(EngineError, match=r"ended with code 3[\s\S]*CUDA out of memory"):
            engine.status()
    finally:
        engine.stop()


def test_server_that_does_not_come_up_shows_its_last_lines(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAILS", "1")

    with pytest.raises(EngineError, match=r"ended with code 1[\s\S]*No available memory for the cache blocks"):
        owned(tiny_folder).start()


def test_without_vllm_the_line_to_install_it_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"vLLM is not installed.*pip install"):
        owned(tmp_path)


def test_model_that_is_no_folder_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="'tiny' is none; name a folder"):
        VllmOptions().create(REQUEST)
