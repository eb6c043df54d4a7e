"""How a model learns: every choice of the optimiser, of the objective and of samples, checked when it is made.

A preset is a published method with all that belongs to it. `LearnerSettings.dapo()` has its part of DAPO, and `GRPO`
takes the rest from `SampleSettings.dapo()` and samples dynamically, where nothing else is set.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from typing_extensions import Self

from agentlightning.algorithm.comparison import FailedReward, check_failed_reward
from agentlightning.algorithm.grpo.advantages import AdvantageFunction, AdvantageKind
from agentlightning.algorithm.utils import check_least
from agentlightning.engine.base import EngineChoice
from agentlightning.errors import ConfigurationError
from agentlightning.utils.spelling import suggests_arguments

if TYPE_CHECKING:
    from torch import Tensor

    from agentlightning.algorithm.grpo.grpo import GRPO
    from agentlightning.algorithm.grpo.objective import ChosenTokens

LossFunction: TypeAlias = "Callable[[ChosenTokens], tuple[Tensor, Mapping[str, Tensor]]]"
"""From the tokens that the model chose to a loss for each of them, and figures for the metrics, one entry per token as
well. The mean of a figure is shown, or the largest where its name ends in `_max`."""
LossName = Literal["clipped", "cispo"]
Objective = Literal["policy", "likelihood"]
RatioLevel = Literal["token", "sequence"]
Aggregate = Literal["token_mean", "sequence_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
Precision = Literal["full", "bf16"]
Optimiser = Literal["adamw", "adamw8bit"]
Schedule = Literal["constant", "linear", "cosine"]
Preset = Literal["dr_grpo", "dapo", "gspo", "cispo"]
RolloutWeighting = Literal["sequence", "rollout"]
Credit = Literal["rollout", "turn"]
_CHOICES: Final = {
    "objective": Objective,
    "level": RatioLevel,
    "importance_level": RatioLevel,
    "aggregate": Aggregate,
    "kl_estimator": KlEstimator,
    "precision": Precision,
    "optimiser": Optimiser,
    "schedule": Schedule,
}
_NOT_NEGATIVE: Final = (
    *("weight_decay", "warmup_steps", "warmup_ratio", "clip_low", "clip_high"),
    *("kl_coefficient", "entropy_coefficient"),
)
OVERLONG_SHARE: Final = 5
"""What part of the longest answer DAPO's buffer is."""


@suggests_arguments
@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """The choices of a `Learner`; ConfigurationError names the one that cannot be used."""

    learning_rate: float | None = None
    """None is 1e-6 for all weights of a Hugging Face model, 1e-5 for adapters of one, and 5e-4 for the tiny model. 0
    computes everything and changes nothing."""
    optimiser: Optimiser = "adamw"
    """"adamw8bit" keeps its two moments of every weight in 8 bits each instead of 32; it needs bitsandbytes, and a
    single process."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    """Optimiser steps over which the learning rate grows in equal parts to its full size."""
    warmup_ratio: float = 0.0
    """The same as a share of `total_steps`; the longer of the two counts."""
    schedule: Schedule = "constant"
    """What becomes of the learning rate after the warm-up: it stays, or falls to 0 in a line or half a cosine."""
    total_steps: int | None = None
    """Optimiser steps at which a schedule ends; None takes those of the whole training, as it is planned."""
    max_grad_norm: float | None = 1.0
    """Longer gradients are shortened to this; None leaves them as they are."""
    epochs: int = 1
    """How often an update goes through its samples."""
    minibatches: int = 2
    """Optimiser steps of one epoch; fewer where there are fewer samples."""
    max_batch_tokens: int | None = None
    """Tokens, padding included, that go through the model together; a minibatch that has more is accumulated. None is
    4,096, and for a Hugging Face model on a GPU up to 32,768: as many as half of the free memory suffices for."""
    objective: Objective = "policy"
    """"likelihood" maximises the log-probability of the samples, weighted by advantage: supervised fine-tuning."""
    loss: "LossName | LossFunction" = "clipped"
    """What is minimised with the objective "policy": "clipped" is that of GRPO, Dr. GRPO and DAPO, and of GSPO with
    `level="sequence"`; "cispo" weighs tokens by a clipped ratio; or a function of your own, see `LossFunction`."""
    level: RatioLevel = "token"
    """Whether the ratio of new to old probability is of a token, or the geometric mean of a sequence; the latter is
    clipped far more narrowly, see `gspo`."""
    aggregate: Aggregate = "token_mean"
    """Every token counts alike; or every sequence, by the mean of its tokens; or the sum of a sequence's tokens is
    divided by `constant_length`, whatever its length (Dr. GRPO). All that were sampled count, also those that teach
    nothing: the fewer groups teach, the smaller the step."""
    constant_length: int = 1024
    clip_low: float = 0.2
    """A ratio below 1 minus this is no further reason to make a bad token less likely."""
    clip_high: float = 0.28
    """A ratio above 1 plus this is no further reason to make a good token more likely."""
    dual_clip: float | None = None
    """Bound of the ratio of tokens with a negative advantage, above 1; None has no bound there."""
    kl_coefficient: float = 0.0
    """Above 0, the model is held near the one it was when the learner was made."""
    kl_estimator: KlEstimator = "k3"
    """How the KL is read off the chosen tokens; `objective` has the formulas, and which gradient each has."""
    entropy_coefficient: float = 0.0
    importance_cap: float | Literal["auto"] | None = "auto"
    """With a cap, ratios are taken to the learner's own log-probabilities before the update, and a token is weighted
    by how much likelier the learner finds it than the engine that sampled it did, up to the cap. None takes ratios to
    the engine's log-probabilities. "auto" is 2 where vLLM or another foreign engine samples, whose arithmetic differs
    from the learner's, and else None."""
    importance_level: RatioLevel = "token"
    """Whether a token's weight is its own, or that of its sequence: the product of the ratios of all its tokens. Either
    is cut at `importance_cap`."""
    importance_band: tuple[float, float] | None = None
    """Leave out sequences whose tokens the learner finds, in the geometric mean, less or more likely than the engine
    did by factors outside of this band, such as (0.8, 1.25)."""
    precision: Precision = "full"
    """"bf16" computes in 16 bits where torch's autocast finds it safe; the weights stay as they are."""
    gradient_checkpointing: bool | None = None
    """Of Hugging Face models: keep the inputs of layers alone for the backward pass, which computes the rest again. It
    takes a third more time and a fraction of the memory. None does so on a GPU where half of the free memory does not
    suffice otherwise for `max_batch_tokens`, or 4,096."""
    packing: bool | None = None
    """Of Hugging Face models: lay rows end to end instead of padding them. None does so on a GPU in 16 bits, where
    torch has a kernel for it, if the model computes the same then."""
    threads: int | None = None
    """Threads of torch within one operation while the learner works; None is one for a small model on the CPU, where
    a second costs far more than it does on busy cores, and else torch's own number."""
    processes: int = 1
    """More than one split the weights, gradients and moments of a Hugging Face model among as many processes, one for
    each GPU of this machine (FSDP2), or all on the CPU; only `GRPO` starts them."""
    seed: int | None = None
    """Of the order in which samples are put into minibatches, and of rounding; None takes that of the algorithm."""
    preset: Preset | None = None
    """Set by a preset: `GRPO` chooses samples as it does, where it is given no `SampleSettings`."""

    @classmethod
    def dr_grpo(cls, **changes: Any) -> Self:
        """Dr. GRPO (Liu et al. 2025): every token counts the same, whatever the length of its answer or of others.

        `constant_length` is the longest answer. Advantages are not divided by a deviation.
        """
        return cls(**{"preset": "dr_grpo", "aggregate": "constant", "clip_low": 0.2, "clip_high": 0.2, **changes})

    @classmethod
    def dapo(cls, **changes: Any) -> Self:
        """DAPO (Yu et al. 2025): a higher upper bound of the ratio, and every token of a batch counts the same.

        Groups without variance are replaced by others, and too long answers are punished softly.
        """
        return cls(**{"preset": "dapo", "aggregate": "token_mean", "clip_low": 0.2, "clip_high": 0.28, **changes})

    @classmethod
    def gspo(cls, **changes: Any) -> Self:
        """GSPO (Zheng et al. 2025): ratios of whole sequences, in narrow bounds; every sequence counts the same."""
        own = {"level": "sequence", "aggregate": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4}
        return cls(**{"preset": "gspo", **own, **changes})

    @classmethod
    def cispo(cls, **changes: Any) -> Self:
        """CISPO (MiniMax 2025): tokens are weighted by their ratio, at most 5, and none loses its gradient."""
        own = {"loss": "cispo", "aggregate": "token_mean", "clip_low": 1.0, "clip_high": 4.0}
        return cls(**{"preset": "cispo", **own, **changes})

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            check_choice(name, getattr(self, name), kind)
        if not callable(self.loss):
            check_choice("loss", self.loss, LossName)
        check_least(self, epochs=1, minibatches=1, max_batch_tokens=1, constant_length=1, processes=1)
        check_least(self, threads=1, total_steps=1)
        not_negative = "a number that is not negative"
        rules = [(name, 0 <= getattr(self, name) < math.inf, not_negative) for name in _NOT_NEGATIVE]
        for name, least in (("max_grad_norm", 0.0), ("cap", 0.0), ("dual_clip", 1.0)):
            value = getattr(self, name)
            is_valid = value is None or least < value < math.inf
            rules.append(("importance_cap" if name == "cap" else name, is_valid, f"None or above {least:g}"))
        rate, cap = self.learning_rate, self.importance_cap
        rules += [
            ("learning_rate", rate is None or 0 <= rate < math.inf, f"None, or {not_negative}"),
            ("epsilon", 0 < self.epsilon < math.inf, "above 0"),
            ("clip_low", self.clip_low <= 1, "at most 1"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1"),
            ("importance_cap", cap == "auto" or not isinstance(cap, str), "'auto', None or above 0"),
            ("warmup_ratio", self.warmup_ratio <= 1, "at most 1"),
        ]
        if (band := self.importance_band) is not None:
            rules.append(("importance_band", 0 <= band[0] < 1 < band[1], "two factors, one below and one above 1"))
        if self.processes > 1:
            rules.append(("optimiser", self.optimiser == "adamw", "'adamw' where there are several processes"))
            rules.append(("loss", not callable(self.loss), "'clipped' or 'cispo' where there are several processes"))
        if self.loss != "clipped":
            of_clipped = "left as it is: it belongs to the loss 'clipped'"
            rules.append(("level", self.level == "token", of_clipped))
            rules.append(("dual_clip", self.dual_clip is None, of_clipped))
            rules.append(("loss", self.objective == "policy", "'clipped' with objective='likelihood'"))
        for name, is_valid, wanted in rules:
            if not is_valid:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; it must be {wanted}.")

    @property
    def cap(self) -> float | None:
        """`importance_cap`, where "auto" that nobody decided is None."""
        return None if isinstance(self.importance_cap, str) else self.importance_cap

    @property
    def corrects_engine(self) -> bool:
        """Whether tokens are weighted or left out by what the engine found instead of the learner."""
        return self.cap is not None or self.importance_band is not None

    def for_engine(self, *, is_embedded: bool) -> Self:
        """The same with "auto" decided."""
        if self.importance_cap != "auto":
            return self
        return replace(self, importance_cap=None if is_embedded else 2.0)

    def planned(self, total_steps: int, seed: int, loss: "LossName | LossFunction | None" = None) -> Self:
        """The same with the steps of the whole training and its seed, where none are set, and with its loss."""
        steps = total_steps if self.total_steps is None else self.total_steps
        seed = seed if self.seed is None else self.seed
        return replace(self, total_steps=steps, seed=seed, loss=loss or self.loss)

    def rate_share(self, step: int) -> float:
        """What part of its learning rate the optimiser's step has, counted from 0."""
        if self.total_steps is None and (self.schedule != "constant" or self.warmup_ratio):
            raise ConfigurationError("A schedule of the learning rate needs total_steps, the steps of the training.")
        total = self.total_steps or 0
        warmup = max(self.warmup_steps, math.ceil(self.warmup_ratio * total))
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        if self.schedule == "linear":
            return 1 - done
        return (1 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1.0


@suggests_arguments
@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """Which rollouts count, and how; ConfigurationError names the value that cannot be used."""

    advantage: AdvantageKind | AdvantageFunction = "grpo"
    """How rewards are compared, by name or by a function of your own; see `AdvantageFunction`."""
    reward_weights: Mapping[str, float] | None = None
    """A rollout's reward is the sum of the rewards that it emitted under these names, times their weights; one that it
    did not emit counts 0, one that no rollout of a step emitted is an error. None takes the primary reward."""
    credit: Credit = "rollout"
    """"turn" judges each model call by the rewards emitted after it, up to the end: returns to go, compared with those
    of the same turn of other rollouts of the group. "rollout" gives all calls the rollout's advantage."""
    discount: float = 1.0
    """With turns: what a reward counts one turn earlier."""
    longest_answer: int | None = None
    """Tokens at which DAPO's soft penalty is -1: it is added to the reward of a rollout with an answer that is longer
    than this less `overlong_buffer`, within which it grows from 0. None has no penalty."""
    overlong_buffer: int | None = None
    """None is a fifth of `longest_answer`."""
    failed: FailedReward = "skip"
    """What a rollout that failed counts: "skip" leaves it out, because it may be the machine's fault; "worst" is 0, or
    the smallest reward of the batch if that is negative; a number is its reward. If it counts, it is learned from."""
    min_group_size: int = 2
    """Rewards that a group needs; with "reinforce_plus_plus", that the batch needs."""
    skip_truncated: bool = True
    """Leave out sequences with an answer that was cut off; False learns from them as from any other, but for those that
    the server broke off."""
    guess_truncated: bool = False
    """Where the finish reason of a call was not recorded, an answer that does not end with an end token counts as cut
    off; that is wrong for those that a stop text ended."""
    max_tokens: int | None = None
    """Longer sequences are left out."""
    max_staleness: int | None = None
    """Sequences sampled from weights that are more versions old than this are left out."""
    rollout_weighting: RolloutWeighting = "sequence"
    """Every sequence counts 1; or every rollout counts 1, and its sequences share that equally."""
    temperature: float = 1.0
    """With which the rollouts were sampled."""

    @classmethod
    def dr_grpo(cls, **changes: Any) -> Self:
        """Advantages without a deviation, and answers that were cut off are learned from."""
        return cls(**{"advantage": "grpo_no_std", "skip_truncated": False, **changes})

    @classmethod
    def dapo(cls, **changes: Any) -> Self:
        """Answers that were cut off are learned from, and long ones are punished softly: set `longest_answer`."""
        return cls(**{"longest_answer": 20_480, "skip_truncated": False, **changes})

    @classmethod
    def gspo(cls, **changes: Any) -> Self:
        """Answers that were cut off are learned from."""
        return cls(**{"skip_truncated": False, **changes})

    cispo = gspo

    def planned(
        self, temperature: float, max_staleness: int, advantage: AdvantageKind | AdvantageFunction | None
    ) -> Self:
        """The same for a training that samples and waits so: what is older than it may be is left out."""
        oldest = (max_staleness or None) if self.max_staleness is None else self.max_staleness
        advantage = advantage or self.advantage
        return replace(self, temperature=temperature, max_staleness=oldest, advantage=advantage)

    @classmethod
    def of(cls, preset: Preset | None) -> Self:
        """What belongs to a preset of `LearnerSettings`."""
        made: Self = cls() if preset is None else getattr(cls, preset)()
        return made

    def __post_init__(self) -> None:
        if not callable(self.advantage):
            check_choice("advantage", self.advantage, AdvantageKind)
        check_choice("rollout_weighting", self.rollout_weighting, RolloutWeighting)
        check_choice("credit", self.credit, Credit)
        check_failed_reward("failed", self.failed)
        check_least(self, min_group_size=2, max_tokens=2, longest_answer=1, overlong_buffer=1)
        check_least(self, max_staleness=0, temperature=0, discount=0)
        if self.overlong_buffer is not None and self.overlong_buffer > (self.longest_answer or 0):
            raise ConfigurationError(f"overlong_buffer is {self.overlong_buffer}; set a longest_answer that is longer.")
        weights = self.reward_weights
        if weights is not None and (not weights or not all(map(math.isfinite, weights.values()))):
            raise ConfigurationError(f"reward_weights is {dict(weights)}; give finite weights by names of rewards.")
        if weights is not None and self.credit == "turn":
            raise ConfigurationError("reward_weights cannot be used with credit='turn': calls have primary rewards.")


def check_choice(name: str, value: object, kind: object) -> None:
    """ConfigurationError unless a value is one of a `Literal`."""
    if value not in get_args(kind):
        options = ", ".join(repr(option) for option in get_args(kind))
        raise ConfigurationError(f"{name} is {value!r}; it must be one of {options}.")


def check_options(grpo: "GRPO", engine: EngineChoice | None, *, resume: bool) -> None:
    """ConfigurationError for options with which there would be nothing to learn, no end, or no place for the model."""
    if grpo.group_size < 2:
        raise ConfigurationError(
            f"A group is compared with itself, so group_size must be at least 2, not {grpo.group_size}."
        )
    check_least(grpo, tasks_per_step=1, steps=1, save_every=1, validation_tasks=1)
    check_least(grpo, max_staleness=0, validate_every=0, temperature=0, validation_temperature=0)
    check_failed_reward("validation_failed", grpo.validation_failed)
    if grpo.sampling.credit == "turn" and grpo.learning.level == "sequence":
        raise ConfigurationError("credit='turn' needs level='token': a ratio of a sequence knows no turns.")
    if grpo.max_staleness and getattr(engine, "sleep", False):
        raise ConfigurationError(
            f"max_staleness is {grpo.max_staleness}, so rollouts are under way while the model learns, and an "
            "engine that sleeps meanwhile would answer none; set sleep=False or max_staleness=0."
        )
    address = getattr(engine, "address", None)
    if address is not None and grpo.lora is None and not isinstance(grpo.model, str) and len(grpo.model) > 1:
        raise ConfigurationError(
            f"The vLLM at '{address}' holds the weights of one model, and {len(grpo.model)} are to be trained; set "
            "engine='vllm', which starts one for each, or train adapters with lora=LoraOptions()."
        )
    output, checkpoints = grpo.output, grpo.checkpoints
    if resume and checkpoints is None:
        raise ConfigurationError("To resume, name the folder of the checkpoints.")
    if output is not None and checkpoints is not None and checkpoints.resolve().is_relative_to(output.resolve()):
        raise ConfigurationError(
            f"output '{output}' is replaced at the end, and the checkpoints '{checkpoints}' are in it; "
            "name another folder."
        )
