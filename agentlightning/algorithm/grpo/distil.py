"""Distillation on policy: a student learns, token by token, what a teacher finds of the student's own rollouts.

The student works as in GRPO, and the teacher is asked how likely it finds each token that the student chose. The
advantage of a token is log teacher - log student, the negative reverse KL as that token shows it, so no reward is
needed; with a `reward_weight`, the advantage by rewards is added. The teacher answers nothing and sees only token ids,
so both must have the same vocabulary.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Protocol

import requests

from agentlightning.algorithm.batches import FinishedRollout
from agentlightning.algorithm.grpo.advantages import ComparedReward, advantages
from agentlightning.algorithm.grpo.grpo import GRPO
from agentlightning.algorithm.grpo.policy import Policy
from agentlightning.algorithm.grpo.samples import Batch, Sample
from agentlightning.engine.codec import ChatCodec
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.utils.json_values import JsonObject

PROBE: Final = "say 12+34"
"""What a teacher must read in the tokens that the student makes of it."""
LOWEST_LOGPROB: Final = -30.0
"""A token that the teacher finds less likely counts as this one, so that one token cannot rule a step."""
REQUEST_SECONDS: Final = 300.0


class Teacher(Protocol):
    """Says how likely a model finds given tokens."""

    def read(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens in the teacher's vocabulary, special tokens left out or not."""

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Of the chosen tokens of each sample, at the temperature at which it was sampled."""


class LoadedTeacher:
    """A model in this process: "tiny", or the folder of a Hugging Face model."""

    def __init__(self, source: str, device: str = "auto") -> None:
        from agentlightning.engine.checkpoint import load

        self._model, self._codec = load(source, device=device)

    def read(self, token_ids: Sequence[int]) -> str:
        return self._codec.parse(token_ids).content or ""

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        import torch

        from agentlightning.algorithm.grpo.packing import SMALL_BATCH, Row, packs
        from agentlightning.algorithm.grpo.token_logprobs import token_logprobs

        rows = [Row.of(sample, self._model) for sample in samples]
        found: dict[int, list[float]] = {}
        self._model.train_mode(enabled=False)
        with torch.no_grad():
            for pack in packs(rows, SMALL_BATCH, self._model.device):
                hidden = self._model.hidden(pack.ids, pack.lengths, pack.selected)
                flat = token_logprobs(hidden, pack.chosen, pack.temperatures, head=self._model.head()).logprobs
                for row, own in zip(pack.rows, torch.split(flat.cpu(), pack.counts), strict=True):
                    found[id(row)] = own.tolist()
        return [found[id(row)] for row in rows]


class ServedTeacher:
    """A vLLM server, which gives `prompt_logprobs`; its answers are those at temperature 1."""

    def __init__(self, address: str, model: str, api_key: str | None = None) -> None:
        self._root, self._model = address.rstrip("/").removesuffix("/v1"), model
        self._session = requests.Session()
        if api_key is not None:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def read(self, token_ids: Sequence[int]) -> str:
        return str(self._post("/detokenize", {"model": self._model, "tokens": list(token_ids)})["prompt"])

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        if any(sample.temperature not in (0.0, 1.0) for sample in samples):
            raise ConfigurationError("A served teacher knows probabilities at temperature 1; set GRPO's temperature=1.")
        prompts = [sample.token_ids for sample in samples]
        body = {"model": self._model, "prompt": prompts, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        choices = sorted(self._post("/v1/completions", body)["choices"], key=lambda choice: choice["index"])
        return [
            [
                float(places[place][str(token)]["logprob"])
                for place, token in enumerate(sample.token_ids)
                if sample.loss_mask[place]
            ]
            for sample, places in zip(samples, (choice["prompt_logprobs"] for choice in choices), strict=True)
        ]

    def _post(self, path: str, body: JsonObject) -> Any:
        try:
            response = self._session.post(self._root + path, json=body, timeout=REQUEST_SECONDS)
            response.raise_for_status()
        except requests.RequestException as error:
            raise TrainingError(
                f"The teacher '{self._model}' does not answer at {self._root}{path}: {error}"
            ) from error
        return response.json()


class Distil(GRPO):
    """Trains a student to choose as its teacher would, in the student's own rollouts.

    Args:
        student: As `GRPO(model)`.
        teacher: "tiny", the folder of a Hugging Face model, or a `Teacher`, such as `ServedTeacher` for a vLLM server.
        reward_weight: How much the advantage by rewards counts beside the teacher. With 0, rollouts need no reward.
        options: As those of `GRPO`.
    """

    def __init__(
        self, student: str = "tiny", *, teacher: str | Path | Teacher, reward_weight: float = 0.0, **options: Any
    ) -> None:
        if not reward_weight >= 0:
            raise ConfigurationError(f"reward_weight is {reward_weight}; it must not be negative.")
        self.student, self.teacher, self.reward_weight = student, teacher, reward_weight
        super().__init__(student, **options)
        self._kind = self.sampling.advantage
        self.sampling = replace(self.sampling, advantage=self._moved)
        self._loaded_teacher: Teacher | None = None

    def _moved(self, rewards: Sequence[ComparedReward]) -> Sequence[float]:
        """Advantages and 1, so that no group is left out for having none: it learns from the teacher."""
        if callable(self._kind):
            return [1.0 + value for value in self._kind(rewards)]
        groups = [one.group for one in rewards]
        return [1.0 + value for value in advantages([one.reward for one in rewards], self._kind, groups=groups).values]

    async def _judged(self, finished: list[FinishedRollout]) -> list[FinishedRollout]:
        judged = await super()._judged(finished)
        if self.reward_weight:
            return judged
        return [replace(one, reward=0.0) if one.reward is None and one.has_succeeded else one for one in judged]

    async def _prepare(self) -> None:
        self._loaded_teacher = await asyncio.to_thread(self._loaded, self.policies[0].codec)

    def _loaded(self, codec: ChatCodec) -> Teacher:
        """The teacher; ConfigurationError if it has another vocabulary than the student."""
        given = self.teacher
        teacher = LoadedTeacher(str(given), self.device) if isinstance(given, (str, Path)) else given
        text = teacher.read(codec.render([{"role": "user", "content": PROBE}]))
        if PROBE not in text:
            raise ConfigurationError(
                f"The teacher '{given}' has another vocabulary than the student '{self.student}': it reads {text!r} "
                f"in the student's tokens of '{PROBE}'. Give a teacher of the same family."
            )
        return teacher

    async def _batch(self, finished: Sequence[FinishedRollout], policy: Policy, replaced_groups: int) -> Batch:
        assert self._loaded_teacher is not None
        batch = await super()._batch(finished, policy, replaced_groups)
        if any(not sample.has_logprobs for sample in batch.samples):
            raise TrainingError("Some tokens came without log-probabilities; sample with an engine that gives them.")
        if batch.samples:
            scores = await asyncio.to_thread(self._loaded_teacher.logprobs, batch.samples)
            gaps = [_gaps(sample, own) for sample, own in zip(batch.samples, scores, strict=True)]
            chosen = [gap for own in gaps for gap in own if gap is not None]
            batch.report.figures["distil/reverse_kl"] = -fmean(chosen)
            pairs = zip(batch.samples, gaps, strict=True)
            batch.samples[:] = [
                replace(sample, token_advantages=self._advantages(sample, own)) for sample, own in pairs
            ]
        return batch

    def _advantages(self, sample: Sample, gaps: Sequence[float | None]) -> list[float]:
        rewarded = sample.token_advantages or [sample.advantage] * len(gaps)
        return [
            0.0 if gap is None else gap + self.reward_weight * (by_reward - 1.0)
            for gap, by_reward in zip(gaps, rewarded, strict=True)
        ]


def _gaps(sample: Sample, teacher_logprobs: Sequence[float]) -> list[float | None]:
    """How much likelier the teacher finds each token than the student did; None for tokens that were given."""
    scores = iter(teacher_logprobs)
    return [
        max(LOWEST_LOGPROB, next(scores)) - (logprob or 0.0) if is_chosen else None
        for logprob, is_chosen in zip(sample.logprobs, sample.loss_mask, strict=True)
    ]
