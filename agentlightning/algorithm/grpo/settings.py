"""How a learner learns: every choice of the optimiser and of the objective, checked when it is made."""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from typing_extensions import Self

from agentlightning.errors import ConfigurationError

__all__ = [
    "Aggregate",
    "KlEstimator",
    "LearnerSettings",
    "Objective",
    "Optimiser",
    "Precision",
    "RatioLevel",
    "check_choice",
]

Objective = Literal["policy", "likelihood"]
RatioLevel = Literal["token", "sequence"]
Aggregate = Literal["token_mean", "sequence_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
Precision = Literal["full", "bf16"]
Optimiser = Literal["adamw", "adamw8bit"]
FOREIGN_ENGINE_CAP: Final = 2.0
"""Of importance weights where an engine samples whose arithmetic is not ours."""
_CHOICES: Final = {
    "objective": Objective,
    "level": RatioLevel,
    "aggregate": Aggregate,
    "kl_estimator": KlEstimator,
    "precision": Precision,
    "optimiser": Optimiser,
}
_AT_LEAST_ONE: Final = ("epochs", "minibatches", "max_batch_tokens", "constant_length", "processes")
_NOT_NEGATIVE: Final = (
    *("weight_decay", "warmup_steps", "clip_low", "clip_high"),
    *("kl_coefficient", "entropy_coefficient"),
)


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """The choices of a `Learner`; ConfigurationError names the one that cannot be used."""

    learning_rate: float | None = None
    """None is 1e-6 for all weights of a Hugging Face model, 1e-5 for adapters of one, and 5e-4 for the tiny model. 0
    computes everything and changes nothing."""
    optimiser: Optimiser = "adamw"
    """"adamw8bit" keeps its two moments of every weight in 8 bits each instead of 32."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    """Optimiser steps over which the learning rate grows in equal parts to its full size."""
    max_grad_norm: float | None = 1.0
    """Longer gradients are shortened to this; None leaves them as they are."""
    epochs: int = 1
    """How often an update goes through its samples."""
    minibatches: int = 2
    """Optimiser steps of one epoch; fewer where there are fewer samples."""
    max_batch_tokens: int = 4096
    """Tokens, padding included, that go through the model together; a minibatch that has more is accumulated."""
    objective: Objective = "policy"
    """"likelihood" maximises the log-probability of the samples, weighted by advantage: supervised fine-tuning."""
    level: RatioLevel = "token"
    """Whether the ratio of new to old probability is of a token, or the geometric mean of a sequence (GSPO)."""
    aggregate: Aggregate = "token_mean"
    """Every token counts alike; or every sequence, by the mean of its tokens; or the sum of a sequence's tokens is
    divided by `constant_length`, whatever its length (Dr. GRPO)."""
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
    precision: Precision = "full"
    """"bf16" computes in 16 bits where torch's autocast finds it safe; the weights stay as they are."""
    gradient_checkpointing: bool | None = None
    """Of Hugging Face models: keep the inputs of layers alone for the backward pass, which computes the rest again. It
    takes a third more time and a fraction of the memory. None does so on a GPU."""
    packing: bool | None = None
    """Of Hugging Face models: lay rows end to end instead of padding them. None does so on a GPU in 16 bits, where
    torch has a kernel for it, if the model computes the same then."""
    threads: int | None = None
    """Threads of torch within one operation while the learner works; None is one for a small model on the CPU, where
    a second costs far more than it does on busy cores, and else torch's own number."""
    processes: int = 1
    """More than one split the weights, gradients and moments of a Hugging Face model among as many processes, one for
    each GPU of this machine (FSDP2), or all on the CPU; only `GRPO` starts them."""
    seed: int = 0
    """Of the order in which samples are put into minibatches."""

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            check_choice(name, getattr(self, name), kind)
        rules = [(name, getattr(self, name) >= 1, "at least 1") for name in _AT_LEAST_ONE]
        not_negative = "a number that is not negative"
        rules += [(name, 0 <= getattr(self, name) < math.inf, not_negative) for name in _NOT_NEGATIVE]
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
            ("threads", self.threads is None or self.threads >= 1, "None or at least 1"),
        ]
        if self.processes > 1:
            rules.append(("optimiser", self.optimiser == "adamw", "'adamw' where there are several processes"))
        for name, is_valid, wanted in rules:
            if not is_valid:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; it must be {wanted}.")

    @property
    def cap(self) -> float | None:
        """`importance_cap`, where "auto" that nobody decided is None."""
        return None if isinstance(self.importance_cap, str) else self.importance_cap

    def for_engine(self, *, is_embedded: bool) -> Self:
        """The same with "auto" decided."""
        if self.importance_cap != "auto":
            return self
        return replace(self, importance_cap=None if is_embedded else FOREIGN_ENGINE_CAP)


def check_choice(name: str, value: object, kind: object) -> None:
    """ConfigurationError unless a value is one of a `Literal`."""
    if value not in get_args(kind):
        options = ", ".join(repr(option) for option in get_args(kind))
        raise ConfigurationError(f"{name} is {value!r}; it must be one of {options}.")
