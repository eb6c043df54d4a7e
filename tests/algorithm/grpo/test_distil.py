"""Distillation on policy: the teacher's advantages, a whole run, teachers that cannot teach, and a served teacher."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the learner needs torch")

from agentlightning.algorithm.grpo.distil import Distil, LoadedTeacher, ServedTeacher, _gaps  # noqa: E402
from agentlightning.algorithm.grpo.learner import Learner  # noqa: E402
from agentlightning.algorithm.grpo.samples import Sample  # noqa: E402
from agentlightning.algorithm.grpo.settings import LearnerSettings  # noqa: E402
from agentlightning.engine.checkpoint import load, save_model  # noqa: E402
from agentlightning.engine.tiny.codec import TinyChatCodec  # noqa: E402
from agentlightning.errors import ConfigurationError, TrainingError  # noqa: E402
from tests.algorithm.grpo import padded  # noqa: E402
from tests.algorithm.grpo.padded import Answer  # noqa: E402
from tests.algorithm.grpo.small_model import SmallModel  # noqa: E402
from tests.algorithm.grpo.training import TASKS, Asking, SharedEngine, are_same, curve, settings, trainer, weights  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights."""
    folder = tmp_path_factory.mktemp("teacher")
    model, codec = load("tiny")
    with torch.no_grad():
        for weight in model.trainable().values():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    save_model(model, codec, folder, {})
    return folder


def sample(prompt: list[int], chosen: list[int], logprobs: list[float], temperature: float = 1.0) -> Sample:
    given = len(prompt)
    return Sample(
        token_ids=[*prompt, *chosen],
        loss_mask=[0] * given + [1] * len(chosen),
        logprobs=[*[None] * given, *logprobs],
        advantage=1.0,
        version=0,
        group="g",
        rollout_id="ro",
        temperature=temperature,
    )


def test_the_step_is_that_of_the_reverse_kl_computed_by_itself() -> None:
    """The gradient of sum p_student (log p_student - log p_teacher) over tokens that were sampled, REINFORCE-wise."""
    student, master = SmallModel(0), SmallModel(1)
    answers = [Answer([1, 2], [3, 4, 5], [], 0.0), Answer([6], [7, 8], [], 0.0)]
    own = [padded.token_logprobs(student, answer) for answer in answers]
    wanted = [padded.token_logprobs(master, answer).detach() for answer in answers]
    expected = -sum(((w - o).detach() * o).sum() for w, o in zip(wanted, own, strict=True)) / 5  # type: ignore[misc]
    expected.backward()  # type: ignore[union-attr]
    correct = {name: weight.grad.clone() for name, weight in student.trainable().items()}  # type: ignore[union-attr]

    samples = [sample(one.prompt, one.chosen, o.tolist()) for one, o in zip(answers, own, strict=True)]
    loaded = LoadedTeacher.__new__(LoadedTeacher)
    loaded._model = master  # type: ignore[assignment]
    taught = [
        Sample(**{**vars(one), "token_advantages": [gap or 0.0 for gap in _gaps(one, scores)]})
        for one, scores in zip(samples, loaded.logprobs(samples), strict=True)
    ]
    student = SmallModel(0)
    learner = Learner(student, LearnerSettings(minibatches=1, max_grad_norm=None))
    found: dict[str, Any] = {}
    learner._optimiser.step = lambda rate: found.update(  # type: ignore[method-assign]
        {name: weight.grad.clone() for name, weight in student.trainable().items()}  # type: ignore[union-attr]
    )
    learner.update(taught)

    for name, gradient in correct.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-12)


def test_a_student_learns_from_the_teacher_alone(engine: SharedEngine, teacher: Path) -> None:
    class Silent(Asking):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
            await super().rollout_async(task, resources, rollout)

    algorithm = Distil(
        "tiny", teacher=teacher, group_size=2, tasks_per_step=2, steps=2, learning=settings(learning_rate=1e-3)
    )
    made = trainer(algorithm)
    made.fit(Silent(lambda agent, task, rollout, said: 0.0), TASKS)

    points = curve(made, "distil/reverse_kl", "learner/samples", "groups/same")
    assert [point["learner/samples"] for point in points] == [4.0, 4.0]
    assert all(point["distil/reverse_kl"] > 0 for point in points)
    assert not are_same(weights(algorithm), engine.base)
    (run,) = asyncio.run(made.store.query_runs())
    recorded = run.config["settings"]["algorithm"]
    assert (recorded["teacher"], recorded["reward_weight"], recorded["steps"]) == (str(teacher), 0.0, 2)


def test_rewards_count_beside_the_teacher() -> None:
    algorithm = Distil("tiny", teacher="tiny", reward_weight=0.5)
    one = sample([1], [2, 3], [-0.5, -0.25])
    object.__setattr__(one, "advantage", 3.0)  # the 1 by which it is moved, and an advantage of 2

    assert algorithm._advantages(one, [None, 0.25, -0.75]) == [0.0, 1.25, 0.25]


def test_a_teacher_with_another_vocabulary_is_refused_before_the_first_rollout(engine: SharedEngine) -> None:
    class Foreign:
        def read(self, token_ids: Any) -> str:
            return "日本語"

        def logprobs(self, samples: Any) -> list[list[float]]:
            raise AssertionError("it must not be asked")

        def __str__(self) -> str:
            return "foreign-7b"

    agent = Asking(lambda agent, task, rollout, said: 0.0)
    with pytest.raises(ConfigurationError, match="teacher 'foreign-7b' has another vocabulary than the student 'tiny'"):
        trainer(Distil("tiny", teacher=Foreign(), steps=1)).fit(agent, TASKS)
    assert not agent.seen


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="reward_weight is -1"):
        Distil("tiny", teacher="tiny", reward_weight=-1)


# ---------------------------------------------------------------------- a server


@contextmanager
def served(answers: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A server with these answers by path, and what it was asked."""
    requests: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            requests.append((self.path, body))
            content = json.dumps(answers.get(self.path)).encode()
            self.send_response(200 if self.path in answers else 404)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_served_teacher_gives_the_log_probabilities_of_given_tokens() -> None:
    def place(token: int, logprob: float) -> dict[str, Any]:
        return {str(token): {"logprob": logprob, "rank": 3}, "99": {"logprob": -0.1, "rank": 1}}

    answer = {
        "choices": [
            {"index": 1, "prompt_logprobs": [None, place(9, -0.5)]},
            {"index": 0, "prompt_logprobs": [None, place(6, -9.0), place(7, -1.0), place(8, -2.0)]},
        ]
    }
    with served({"/v1/completions": answer, "/detokenize": {"prompt": "say 12+34"}}) as (address, requests):
        teacher = ServedTeacher(address, "big")
        found = teacher.logprobs([sample([5, 6], [7, 8], [-1.0, -1.0]), sample([5], [9], [-1.0])])
        text = teacher.read([1, 2])
        teacher._session.close()

    assert (found, text) == ([[-1.0, -2.0], [-0.5]], "say 12+34")
    assert requests[0] == (
        "/v1/completions",
        {
            "model": "big",
            "prompt": [[5, 6, 7, 8], [5, 9]],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        },
    )


def test_a_served_teacher_that_is_away_or_asked_at_another_temperature_says_so() -> None:
    with served({}) as (address, _):
        teacher = ServedTeacher(address, "big")
        with pytest.raises(TrainingError, match=r"The teacher .big. does not answer at http.*detokenize: 404"):
            teacher.read(TinyChatCodec().render([{"role": "user", "content": "hello"}]))
        with pytest.raises(ConfigurationError, match="set GRPO's temperature=1"):
            teacher.logprobs([sample([1], [2], [-1.0], temperature=0.7)])
        teacher._session.close()
