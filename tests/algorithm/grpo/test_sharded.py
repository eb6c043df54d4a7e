"""Several processes learn what one would, give and take its checkpoints, and are gone when they should be."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.optional import optional

torch = pytest.importorskip("torch", reason="GRPO needs torch")
transformers = optional("transformers", reason="Hugging Face models need transformers: the extra hf")
optional("peft", reason="LoRA needs peft: the extra hf")

from agentlightning.algorithm.grpo import GRPO, Checkpoints, Learner, LearnerSettings, SampleSettings  # noqa: E402
from agentlightning.algorithm.grpo.packing import Row  # noqa: E402
from agentlightning.algorithm.grpo.sharded import ShardedLearner  # noqa: E402
from agentlightning.algorithm.grpo.sharded_rank import _shares  # noqa: E402
from agentlightning.algorithm.sft import SFT  # noqa: E402
from agentlightning.engine.checkpoint import load  # noqa: E402
from agentlightning.errors import ConfigurationError, TrainingError  # noqa: E402
from tests.algorithm.grpo.sharded_cases import CASES, on_devices, sample  # noqa: E402
from tests.algorithm.grpo.training import Asking, fit, settings  # noqa: E402
from tests.e2e.server_process import left_behind  # noqa: E402
from tests.engine.small_llama import save_small_llama, word_tokenizer  # noqa: E402

PATIENCE_SECONDS = 100.0
TWO = LearnerSettings(processes=2, learning_rate=1e-2, kl_coefficient=0.1, max_batch_tokens=40)
BATCHES = [[sample(first + number) for number in range(5)] for first in range(3)]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(place for place in sys.path if place),
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
pytestmark = [
    pytest.mark.models,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the loopback device has another name"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small models: one plain, and one whose embeddings are its head too."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("plain", "tied"):
        save_small_llama(folder / name, word_tokenizer())
    config = transformers.AutoConfig.from_pretrained(folder / "tied", tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "tied")
    return folder


def model_of(folder: Path, name: str = "plain", dtype: str = "float64") -> Any:
    return load(str(folder / name), device="cpu", dtype=dtype)[0]


def started(folder: Path, model: Any) -> ShardedLearner:
    learner = ShardedLearner(model, TWO, source=str(folder / "plain"), device="cpu", lora=None)
    learner.start()
    return learner


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[ShardedLearner]:
    """One for the tests that leave it able to learn."""
    learner = started(folder, model_of(folder))
    yield learner
    learner.stop()


def furthest(one: Any, other: Any) -> float:
    own, others = one.state(), other.state()
    return max(float((own[name] - others[name]).abs().max()) for name in own)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


# ---------------------------------------------------------------------- equality


def test_two_processes_learn_what_one_does(folder: Path) -> None:
    """All cases in one start, which takes far longer than they do."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--log-dir={folder}"]
    cases = ["-m", "tests.algorithm.grpo.sharded_cases", str(folder), str(folder / "results.json")]
    command = [sys.executable, *torchrun, "--nproc-per-node=2", *cases]

    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=False)

    assert done.returncode == 0, done.stderr.decode()[-4000:]
    results = json.loads((folder / "results.json").read_text())
    for name, case in CASES.items():
        bound, exactness = (1e-6, 1e-4) if case.dtype == "float32" else (1e-12, 1e-9)
        assert results[name]["moved"] > 1e-4, name
        assert results[name]["difference"] <= bound, name
        alone, together = results[name]["figures"]
        for figures in (alone, together):
            del figures["learner/seconds"], figures["learner/padded_tokens"]  # which depend on who computes what
        assert together == pytest.approx(alone, rel=exactness, abs=exactness), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and several for more than one process")
def test_gpus_learn_what_one_does(tmp_path: Path) -> None:
    found = on_devices(tmp_path, "cuda", torch.cuda.device_count())
    assert found["moved"] > 1e-4
    assert found["difference"] <= 1e-5


def test_rows_are_shared_out_by_their_tokens(folder: Path) -> None:
    model = model_of(folder)
    rows = [Row.of(sample(number), model) for number in range(9)]

    shares = _shares(rows, 3)

    tokens = [sum(row.length for row in share) for share in shares]
    assert sorted(id(row) for share in shares for row in share) == sorted(map(id, rows))
    assert max(tokens) - min(tokens) <= min(row.length for row in rows) + 4
    assert _shares(rows[:1], 3) == [[rows[0]], [], []]


# ---------------------------------------------------------------------- checkpoints


def test_a_state_of_one_process_goes_on_in_two_and_back(folder: Path, two: ShardedLearner, tmp_path: Path) -> None:
    whole = Learner(model_of(folder), replace(TWO, processes=1))
    for batch in BATCHES[:2]:
        whole.update(batch)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model_state=whole.model.state(), learner_state=whole.state(), progress={})
    saved = checkpoints.latest()
    assert saved is not None

    two.model.load_state(saved.model_state())
    two.load_state(saved.learner_state())
    two.update(BATCHES[2])
    whole.update(BATCHES[2])

    assert furthest(two.model, whole.model) <= 1e-12
    checkpoints.save(2, model_state=two.model.state(), learner_state=two.state(), progress={})
    back = checkpoints.latest()
    assert back is not None
    resumed = Learner(model_of(folder), replace(TWO, processes=1))
    resumed.model.load_state(back.model_state())
    resumed.load_state(back.learner_state())
    for learner in (resumed, whole):
        learner.update(BATCHES[0])
    assert furthest(resumed.model, whole.model) <= 1e-12
    assert resumed.version == whole.version == 4


def test_a_state_of_another_model_is_refused(two: ShardedLearner) -> None:
    state = two.state()
    moment = {"another.weight": torch.ones(4)}
    state["optimiser"] = {"steps": {"another.weight": 1}, "mean": moment, "square": moment}

    with pytest.raises(TrainingError, match=r"another\.weight"):
        two.load_state(state)


# ---------------------------------------------------------------------- what goes wrong


def test_a_loss_that_is_not_finite_stops_the_step_on_all_ranks(two: ShardedLearner) -> None:
    before = two.model.state()

    with pytest.raises(TrainingError, match="is nan"):
        two.update([sample(1, advantage=1e308, weight=1e-5), sample(2, advantage=-1e308, temperature=1e-300)])

    assert all(torch.equal(weight, before[name]) for name, weight in two.model.state().items())
    assert two.update(BATCHES[0])["learner/samples"] == 5


def test_samples_that_cannot_be_learned_from_disturb_nobody(two: ShardedLearner) -> None:
    with pytest.raises(TrainingError, match="no samples"):
        two.update([])
    with pytest.raises(TrainingError, match="not finite"):
        two.update([*BATCHES[0], sample(1, advantage=float("nan"))])

    assert two.update(BATCHES[0])["learner/samples"] == 5


def test_nothing_listens_beyond_the_loopback_device(two: ShardedLearner) -> None:
    torchrun = psutil.Process(two._torchrun.process_id)
    sockets = [one for process in (torchrun, *torchrun.children()) for one in process.net_connections()]
    assert {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN} <= {"127.0.0.1"}


def test_a_rank_that_is_killed_ends_the_others_and_is_named(folder: Path) -> None:
    learner = started(folder, model_of(folder))
    torchrun = psutil.Process(learner._torchrun.process_id)
    ranks = torchrun.children(recursive=True)
    killed = next(one for one in ranks if one.environ().get("RANK") == "1")
    assert os.getsid(torchrun.pid) != os.getsid(0)  # Ctrl-C in a terminal does not reach them
    place = learner._folder
    assert place is not None

    killed.kill()
    with pytest.raises(TrainingError, match="rank 1"):
        learner.update(BATCHES[0])
    learner.load_state({})  # the model has the weights, and nobody is left to learn
    learner.stop()

    until(lambda: not any(one.is_running() for one in (torchrun, *ranks)))
    assert not place.exists()
    with pytest.raises(TrainingError, match="do not run"):
        learner.state()
    learner.stop()


HOLDER = """
import sys, time
from agentlightning.algorithm.grpo import LearnerSettings
from agentlightning.algorithm.grpo.sharded import ShardedLearner
from agentlightning.engine.checkpoint import load
source = sys.argv[1]
learner = ShardedLearner(load(source)[0], LearnerSettings(processes=2), source=source, device="cpu", lora=None)
learner.start()
print(learner._folder, flush=True)
time.sleep(1000)
"""


def test_nothing_is_left_of_a_training_process_that_is_killed(folder: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder / "plain")], env=ENVIRONMENT, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        place = Path(holder.stdout.readline().decode().strip())
        others = psutil.Process(holder.pid).children(recursive=True)
        assert place.is_dir()

        holder.send_signal(signal.SIGKILL)
        holder.wait()

    assert len(others) >= 3
    until(lambda: not any(one.is_running() for one in others))
    until(lambda: not place.exists())


def test_a_script_that_torchrun_started_is_told_to_start_without_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigurationError, match="start it once"):
        ShardedLearner(model_of(folder), TWO, source="plain", device="cpu", lora=None)


def test_what_cannot_be_shared_out_is_refused_in_words(folder: Path) -> None:
    tiny, _ = load("tiny")
    with pytest.raises(ConfigurationError, match="no Hugging Face model"):
        ShardedLearner(tiny, TWO, source="tiny", device="cpu", lora=None)
    for device, words in (("cuda:1", "device is 'cuda:1'"), ("cuda", "GPUs")):
        many = replace(TWO, processes=1000)
        with pytest.raises(ConfigurationError, match=words):
            ShardedLearner(model_of(folder), many, source="plain", device=device, lora=None)
    with pytest.raises(ConfigurationError, match="processes is 0"):
        LearnerSettings(processes=0)
    with pytest.raises(ConfigurationError, match="optimiser is 'adamw8bit'"):
        LearnerSettings(processes=2, optimiser="adamw8bit")
    with pytest.raises(ConfigurationError, match="SFT trains in 1"):
        SFT("tiny", learning=LearnerSettings(processes=2))


# ---------------------------------------------------------------------- a whole training


def test_a_training_in_two_processes_goes_on_in_one(folder: Path, tmp_path: Path) -> None:
    def variety(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        return len(set(said.split())) / 6

    def algorithm(**changes: Any) -> GRPO:
        return GRPO(
            str(folder / "plain"),
            **{
                "group_size": 4,
                "tasks_per_step": 2,
                "steps": 2,
                "device": "cpu",
                "output": tmp_path / "out",
                **changes,
            },
            sampling=SampleSettings(skip_truncated=False),
            checkpoints=tmp_path / "checkpoints",
        )

    others = {process.pid for process in left_behind()}
    first = algorithm(learning=settings(processes=2, learning_rate=1e-3))
    fit(first, Asking(variety))

    assert first.progress.step == 2
    saved = Checkpoints(tmp_path / "checkpoints" / "policy").latest()
    assert saved is not None
    weights = first.policies[0].model.state()
    assert all(torch.equal(weight, weights[name]) for name, weight in saved.model_state().items())
    assert saved.learner_state()["version"] == first.policies[0].version == 2
    assert furthest(load(str(tmp_path / "out"))[0], first.policies[0].model) == 0
    assert furthest(model_of(folder, dtype="float32"), first.policies[0].model) > 0
    assert {process.pid for process in left_behind()} <= others

    second = algorithm(learning=settings(learning_rate=1e-3), steps=3, resume=True)
    fit(second, Asking(variety))

    assert second.progress.step == 3
    assert second.policies[0].version == 3
