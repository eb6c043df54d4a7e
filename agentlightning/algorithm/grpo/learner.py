"""The learner: samples in, a better model out, and numbers that say how it went.

An update goes through its samples in minibatches, each of which is one step of the optimiser; a minibatch that is too
large for the memory goes through the model in packs whose gradients add up to the same. A loss or gradient that is not
finite stops the update with a TrainingError before the step is made; the steps before it stand. The learner draws from
its own source of chance, which is part of its state, so a run that is resumed makes the steps it would have made.
"""

import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from agentlightning.algorithm.grpo.objective import (
    SQUARE,
    ChosenTokens,
    Loss,
    divergence,
    policy_loss,
    sequence_coefficients,
)
from agentlightning.algorithm.grpo.optimiser import AdamW
from agentlightning.algorithm.grpo.packing import SMALL_BATCH, Pack, Row, packs, planned, remedies
from agentlightning.algorithm.grpo.samples import Sample, Sampled
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.grpo.token_logprobs import TokenLogprobs, token_logprobs
from agentlightning.engine.hf import HfModel
from agentlightning.engine.model import CausalModel, is_small
from agentlightning.engine.weights import RoundedCopy
from agentlightning.errors import ConfigurationError, TrainingError


class Learner:
    """Trains one model, in place."""

    def __init__(
        self,
        model: CausalModel,
        settings: LearnerSettings | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take charge of the model's trainable weights.

        Args:
            model: With a KL term, its weights of this moment are kept as the reference.
            settings: How to learn.
            clock: For the seconds in the metrics.
        """
        self.model = model
        self.settings = settings or LearnerSettings()
        self.version = 0
        """Updates made."""
        self.steps = 0
        """Steps of the optimiser made."""
        self._steps_of_update = 0
        """Those of the update under way."""
        default = 5e-4
        if isinstance(model, HfModel):
            default = 1e-5 if model.has_adapters else 1e-6
        self.learning_rate = default if self.settings.learning_rate is None else self.settings.learning_rate
        """After the warm-up."""
        self._clock = clock
        self._weights = self._trainable()
        if not self._weights:
            raise TrainingError(f"Model '{model.name}' has no weights that may be trained.")
        self._optimiser = AdamW(
            self._weights,
            betas=self.settings.betas,
            epsilon=self.settings.epsilon,
            weight_decay=self.settings.weight_decay,
            in_8_bits=self.settings.optimiser == "adamw8bit",
        )
        self._pack: Pack | None = None
        """What goes through the model now."""
        self.is_checkpointed = self.is_packed = False
        """Whether layers are computed again for their gradients, and whether rows lie end to end."""
        if isinstance(model, HfModel):
            self._save_memory(model)
        self.rounded_copy = self._rounded_copy()
        """What it computes with in 16 bits, in place of the exact weights of a Hugging Face model."""
        if model.device.type != "cuda":
            self.plan_memory()
        self._threads = self.settings.threads or (1 if is_small(model) else None)
        self._order = random.Random(self.settings.seed or 0)
        self._reference: dict[str, Tensor] | None = None
        if self.settings.kl_coefficient > 0:
            self._reference = {name: weight.detach().clone() for name, weight in self._weights.items()}

    def _save_memory(self, model: HfModel) -> None:
        """Choose what computes the same with less memory; ConfigurationError if the model cannot do what is set."""
        settings, is_on_gpu = self.settings, model.device.type == "cuda"
        self.is_checkpointed = bool(settings.gradient_checkpointing) and model.checkpoint_gradients()
        is_short = settings.precision == "bf16" or model.dtype.itemsize == 2
        if settings.packing or (settings.packing is None and is_on_gpu and is_short):
            with self._precision():
                self.is_packed = model.pack_rows()
        for name, is_used in (("gradient_checkpointing", self.is_checkpointed), ("packing", self.is_packed)):
            if getattr(settings, name) and not is_used:
                raise ConfigurationError(f"Model '{model.name}' cannot be trained with {name}=True; leave it None.")

    def plan_memory(self) -> None:
        """Choose by the free memory of the GPU what the settings leave open, and announce the need."""
        self.settings = planned(self.settings, self.model, self.model.device)
        if isinstance(self.model, HfModel) and self.settings.gradient_checkpointing:
            self.is_checkpointed = self.model.checkpoint_gradients()

    def update(self, samples: Sequence[Sample], sampled: Sampled | None = None) -> dict[str, float]:
        """Learn from samples once; the metrics of it.

        Args:
            sampled: What the means of the loss are over, if not over these samples alone; each minibatch has its part.

        Raises:
            TrainingError: there are no samples, one cannot be learned from, a loss or gradient is not finite, or the
                GPU's memory does not suffice.
        """
        if not samples:
            raise TrainingError("There are no samples to learn from.")
        began = self._clock()
        if None in (self.settings.max_batch_tokens, self.settings.gradient_checkpointing):
            self.plan_memory()
        rows = [Row.of(sample, self.model) for sample in samples]
        parts = min(self.settings.minibatches, len(rows))
        if sampled is not None:
            sampled = replace(sampled, weight=sampled.weight / parts, tokens=sampled.tokens / parts)
        figures = Figures()
        is_measured = self.version < 5 or self.version % 5 == 0  # the first ones, and every fifth after them
        # An eighth of the rows show by how much the update changed the model: two passes more, without gradients.
        sample = rows[: -(-len(rows) // 8)] if is_measured and self.settings.objective == "policy" else []
        with _threads(self._threads):
            try:
                self._look_back(rows)
                before = [logprobs for _, logprobs in self.evaluated(sample)]
                self.model.train_mode(enabled=True, dropout=self.settings.objective == "likelihood")
                for _ in range(self.settings.epochs):
                    for minibatch in self._minibatches(rows, parts):
                        self._step(minibatch, sampled, figures)
                        self._steps_of_update += 1
                self.version, self._steps_of_update = self.version + 1, 0
                after = [logprobs for _, logprobs in self.evaluated(sample)]
            except torch.OutOfMemoryError as error:
                traceback.clear_frames(error.__traceback__)  # which hold what was computed so far
                raise TrainingError(self._shortage()) from error
            finally:
                self._steps_of_update = 0
                self._optimiser.forget_gradients()
                self.model.train_mode(enabled=False)
        metrics = self._combined(figures).metrics()
        if sample:
            metrics["learner/update_kl"] = float(divergence(torch.cat(after) - torch.cat(before)).mean())
        return metrics | {
            "learner/samples": len(rows),
            "learner/recomputed": sum(row.engine_logprobs is None for row in rows),
            "learner/learning_rate": self._learning_rate(self.steps - 1),
            "learner/max_batch_tokens": float(self.settings.max_batch_tokens or SMALL_BATCH),
            "learner/checkpointed": float(self.is_checkpointed),
            "learner/seconds": self._clock() - began,
        }

    def state(self) -> dict[str, Any]:
        """All that the next update depends on, beside the weights; a copy, on the CPU."""
        reference: dict[str, Tensor] | None = None
        if self._reference is not None:
            reference = {name: weight.to("cpu", copy=True) for name, weight in self._reference.items()}
        return {
            "version": self.version,
            "steps": self.steps,
            "order": self._order.getstate(),
            "optimiser": self._optimiser.state(),
            "reference": reference,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where another learner of the same model left off; the weights are loaded into the model itself."""
        reference = state["reference"]
        if self._reference is not None and reference is not None and self._reference.keys() != reference.keys():
            raise TrainingError(
                f"The state is not of a learner of model '{self.model.name}': other weights are trained."
            )
        try:
            self._optimiser.load_state(state["optimiser"])
        except TrainingError as error:
            raise TrainingError(f"The state is not of a learner of model '{self.model.name}': {error}") from error
        version, internal, gauss = state["order"]
        self._order.setstate((version, tuple(internal), gauss))
        self.version, self.steps = state["version"], state["steps"]
        if self._reference is not None and reference is not None:
            for name, weight in self._reference.items():
                weight.copy_(reference[name])

    # ------------------------------------------------------------------ what differs where processes share the work

    def _trainable(self) -> dict[str, Parameter]:
        """The weights that the optimiser changes here."""
        return self.model.trainable()

    def _rounded_copy(self) -> RoundedCopy | None:
        """With adapters there is none: what is beneath does not change."""
        if self.settings.precision != "bf16" or not isinstance(self.model, HfModel) or self.model.has_adapters:
            return None
        return RoundedCopy(self.model.network, torch.bfloat16)

    def _clip_gradients(self) -> Tensor:
        """Shorten the gradients to `max_grad_norm`; how long they were."""
        longest = self.settings.max_grad_norm
        return torch.nn.utils.clip_grad_norm_(self._weights.values(), float("inf") if longest is None else longest)

    def _combined(self, figures: "Figures") -> "Figures":
        """The figures of all who took part in an update."""
        return figures

    # ------------------------------------------------------------------ parts

    def _minibatches(self, rows: Sequence[Row], parts: int) -> Iterator[list[Row]]:
        """All rows in a new order, in parts whose sizes differ by one at most."""
        order = list(rows)
        self._order.shuffle(order)
        for part in range(parts):
            yield order[part * len(order) // parts : (part + 1) * len(order) // parts]

    def _look_back(self, rows: Sequence[Row]) -> None:
        """Find what the losses are measured against: the log-probabilities before the update, and the reference's."""
        for row in rows:
            row.old_logprobs = row.engine_logprobs
        if self.settings.objective == "policy":
            unknown = [row for row in rows if self.settings.corrects_engine or row.engine_logprobs is None]
            for row, logprobs in self.evaluated(unknown):
                row.old_logprobs = logprobs
        if self._reference is not None:
            with self._as_reference(self._reference):
                for row, logprobs in self.evaluated(rows):
                    row.reference_logprobs = logprobs

    def evaluated(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Tensor]]:
        """Rows with the log-probabilities that the model gives their chosen tokens."""
        self.model.train_mode(enabled=False)
        with torch.no_grad():
            for pack in self._packs(rows):
                with self._rounded():
                    logprobs = self._logprobs(pack).logprobs
                yield from zip(pack.rows, torch.split(logprobs.cpu(), pack.counts), strict=True)

    @contextmanager
    def _as_reference(self, reference: Mapping[str, Tensor]) -> Iterator[None]:
        """The model computes with the reference's weights; its own are put back untouched."""
        own = {name: weight.data for name, weight in self._weights.items()}
        try:
            for name, weight in self._weights.items():
                weight.data = reference[name]
            yield
        finally:
            for name, weight in self._weights.items():
                weight.data = own[name]

    def _logprobs(self, pack: Pack) -> TokenLogprobs:
        with self._precision():
            hidden = self.model.hidden(pack.ids, pack.lengths, pack.selected)
            return token_logprobs(
                hidden,
                pack.chosen,
                pack.temperatures,
                head=self.model.head(),
                entropy_gradient=self.settings.entropy_coefficient > 0,
            )

    def _precision(self) -> torch.autocast:
        # A weight is used once in a pass, so a cache of weights in 16 bits would only take their memory.
        is_short = self.settings.precision == "bf16"
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=is_short, cache_enabled=False)

    def _rounded(self) -> AbstractContextManager[None]:
        """In 16 bits, compute with the numbers that the engine got: the nearest ones would not show small steps."""
        if self.rounded_copy is None:
            return nullcontext()
        # Published with the chance of their version; what an update makes in between is never published.
        between = f"/{self._steps_of_update}" if self._steps_of_update else ""
        return self.rounded_copy.in_use(f"{self.settings.seed or 0}/{self.version}{between}")

    def _packs(self, rows: Sequence[Row]) -> Iterator[Pack]:
        most = self.settings.max_batch_tokens or SMALL_BATCH
        for pack in packs(rows, most, self.model.device, end_to_end=self.is_packed):
            self._pack = pack
            yield pack
        self._pack = None

    def _shortage(self) -> str:
        """What to say where the GPU's memory did not suffice."""
        where = f"The GPU's memory does not suffice for step {self.steps + 1} (update {self.version + 1})"
        has_adapters = isinstance(self.model, HfModel) and self.model.has_adapters
        ways = remedies(self.settings, has_adapters=has_adapters)
        pack, self._pack = self._pack, None
        if pack is None:
            return (
                f"{where} of the optimiser, which may have changed some weights: go on from a checkpoint, with {ways}."
            )
        longest = max(row.length for row in pack.rows)
        return (
            f"{where}, with {pack.ids.numel():,} tokens in {len(pack.rows)} rows together, the longest of {longest:,} "
            f"(max_batch_tokens is {self.settings.max_batch_tokens:,}); the weights are as they were before this step. "
            f"Give {ways}, or let answers be shorter."
        )

    def _step(self, rows: Sequence[Row], sampled: Sampled | None, figures: "Figures") -> None:
        """One step of the optimiser."""
        settings = self.settings
        self._optimiser.forget_gradients()
        lengths, weights = [row.n_chosen for row in rows], [row.weight for row in rows]
        coefficients = sequence_coefficients(lengths, weights, settings.aggregate, settings.constant_length, sampled)
        coefficient_of = dict(zip(map(id, rows), coefficients, strict=True))
        total = 0.0
        for pack in self._packs(rows):
            with self._rounded():  # also while layers are computed again for their gradients
                loss = policy_loss(self._tokens(pack, [coefficient_of[id(row)] for row in pack.rows]), settings)
                total += self._finite(loss.value, "loss")
                loss.value.backward()  # type: ignore[no-untyped-call]  # torch has not annotated it
            figures.add(pack, loss)
        figures.add_step(total, self._finite(self._clip_gradients(), "gradient"))
        self._optimiser.step(self._learning_rate(self.steps))
        self.steps += 1

    def _tokens(self, pack: Pack, coefficients: Sequence[float]) -> ChosenTokens:
        found = self._logprobs(pack)
        own = found.logprobs.detach()

        def column(parts: Sequence[Tensor | None]) -> Tensor | None:
            known = [part for part in parts if part is not None]
            return torch.cat(known).to(own) if len(known) == len(parts) else None

        old = column([row.old_logprobs for row in pack.rows])
        engine: Tensor | None = None
        if self.settings.corrects_engine:
            engine = column(
                [row.old_logprobs if row.engine_logprobs is None else row.engine_logprobs for row in pack.rows]
            )
        return ChosenTokens(
            logprobs=found.logprobs,
            old_logprobs=own if old is None else old,
            sequences=pack.sequences,
            advantages=torch.cat([row.advantages for row in pack.rows]).to(own),
            coefficients=torch.tensor(coefficients, dtype=torch.float64).to(own),
            entropies=found.entropies,
            engine_logprobs=engine,
            reference_logprobs=column([row.reference_logprobs for row in pack.rows]),
        )

    def _learning_rate(self, step: int) -> float:
        return self.learning_rate * self.settings.rate_share(step)

    def _finite(self, value: Tensor, name: str) -> float:
        number = float(value.item())
        if abs(number) < float("inf"):
            return number
        raise TrainingError(
            f"The {name} of step {self.steps + 1} (update {self.version + 1}) is {number}; the weights are as they "
            "were before this step. A lower learning_rate or max_grad_norm may help."
        )


class Figures:
    """Adds up what the steps of an update say of themselves."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._tokens = 0
        self._padded_tokens = 0

    def add(self, pack: Pack, loss: Loss) -> None:
        self._tokens += pack.chosen.numel()
        self._padded_tokens += pack.ids.numel()
        columns = [*loss.sums.values(), *loss.maxima.values()]
        values = torch.stack([value.to(loss.value.dtype) for value in columns]).tolist()
        sums = dict(zip(loss.sums, values, strict=False))
        self._accumulate(sums, dict(zip(loss.maxima, values[len(sums) :], strict=True)))

    def add_step(self, loss: float, norm: float) -> None:
        self._losses.append(loss)
        self._norms.append(norm)

    def merge(self, other: "Figures") -> None:
        """Add what another process found in its share of the same steps."""
        self._losses = [own + another for own, another in zip(self._losses, other._losses, strict=True)]
        self._tokens += other._tokens
        self._padded_tokens += other._padded_tokens
        self._accumulate(other._sums, other._maxima)

    def _accumulate(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> None:
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        for name, value in maxima.items():
            self._maxima[name] = max(self._maxima.get(name, value), value)

    def metrics(self) -> dict[str, float]:
        steps = len(self._losses)
        found = {
            "loss": sum(self._losses) / steps,
            "grad_norm": sum(self._norms) / steps,
            "grad_norm_max": max(self._norms),
            "steps": float(steps),
            "tokens": float(self._tokens),
            "padded_tokens": float(self._padded_tokens),
            **{name: total / self._tokens for name, total in self._sums.items()},
            **self._maxima,
        }
        square = found.pop(SQUARE, 0.0)
        if square > 0:  # the number of tokens of equal weight that would say as much, as a share of all
            found["effective_share"] = found["weight"] ** 2 / square
        return {f"learner/{name}": value for name, value in found.items()}


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Torch works with so many threads, in the calling thread."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)
