"""torch's AdamW over named weights; the moments of large weights may be kept in 8 bits.

The state is kept by the names of the weights, so that the state of another model is noticed. Moments in 8 bits are
read, changed and written back in slices; of the second ones the square roots are kept, whose range is half as wide.

A number in 8 bits is a code into a table of 256 values, times the largest number of a block of 256. The table is the
dynamic one of bitsandbytes: half of its values are in the upper tenth of the range, a quarter in the tenth below, and
so on over seven powers of ten, so that small numbers beside large ones keep their size. It is written with torch alone,
since a package with kernels of its own is one more that must fit torch, CUDA and Python.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from agentlightning.errors import TrainingError

SMALLEST_QUANTISED: Final = 4096
"""Numbers that a weight must have for its moments to be kept in 8 bits; norms and biases would save nothing."""
BLOCK: Final = 256
"""Numbers that share one scale."""
DECADES: Final = 7
_SLICE_BLOCKS: Final = 1 << 15
"""Blocks that are in 32 bits at a time."""
_GROUPS: Final = ("mean", "square", "mean_scales", "square_scales")
"""Of a state: the moments, and of those in 8 bits the scales."""


class AdamW:
    """Makes steps with the gradients that the weights hold."""

    def __init__(
        self,
        weights: Mapping[str, Parameter],
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        in_8_bits: bool = False,
    ) -> None:
        self.weights = dict(weights)
        is_fused = all(weight.device.type in ("cpu", "cuda") for weight in self.weights.values())
        self._options: dict[str, Any] = {"betas": betas, "eps": epsilon, "weight_decay": weight_decay}
        self._options["fused"] = is_fused
        self._quantised: dict[str, tuple[Quantised, Quantised]] = {}
        """The mean of the gradients, and the root of the mean of their squares, of weights with moments in 8 bits."""
        self._steps: dict[str, int] = {}
        """Made with those weights."""
        for name, weight in self.weights.items():
            is_plain = weight.dtype == torch.float32 and weight.is_contiguous()
            if in_8_bits and is_plain and weight.numel() >= SMALLEST_QUANTISED:
                mean, root = (Quantised(weight.numel(), is_signed=one, device=weight.device) for one in (True, False))
                self._quantised[name] = (mean, root)
        whole = [weight for name, weight in self.weights.items() if name not in self._quantised]
        self._whole = torch.optim.AdamW(whole, **self._options) if whole else None

    def step(self, learning_rate: float) -> None:
        """Change the weights that have gradients."""
        if self._whole is not None:
            self._whole.param_groups[0]["lr"] = learning_rate
            self._whole.step()
        for name in self._quantised:
            if self.weights[name].grad is not None:
                self._step_in_slices(name, learning_rate)

    def _step_in_slices(self, name: str, learning_rate: float) -> None:
        weight, (mean, root) = self.weights[name], self._quantised[name]
        assert weight.grad is not None
        numbers, gradient = weight.detach().view(-1), weight.grad.reshape(-1)
        steps = self._steps.get(name, 0)
        for part in mean.slices():
            piece = Parameter(numbers[part])  # the same memory
            piece.grad = gradient[part]
            sliced = torch.optim.AdamW([piece], lr=learning_rate, **self._options)
            sliced.state[piece] = self._moments(weight, steps, mean.read(part), root.read(part).square_())
            sliced.step()
            mean.write(part, sliced.state[piece]["exp_avg"])
            root.write(part, sliced.state[piece]["exp_avg_sq"].sqrt_())
        self._steps[name] = steps + 1

    def _moments(self, weight: Tensor, steps: int, mean: Tensor, square: Tensor) -> dict[str, Tensor]:
        """As torch's AdamW keeps them."""
        place = weight.device if self._options["fused"] else None
        return {"step": torch.tensor(float(steps), device=place), "exp_avg": mean, "exp_avg_sq": square}

    def forget_gradients(self) -> None:
        """Free what the gradients take."""
        for weight in self.weights.values():
            weight.grad = None

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, beside the weights; a copy, on the CPU."""
        found: dict[str, Any] = {"steps": dict(self._steps), **{group: {} for group in _GROUPS}}
        for name, weight in self.weights.items():
            if name in self._steps:
                mean, root = self._quantised[name]
                kept = [mean.codes, root.codes, mean.scales, root.scales]
            elif self._whole is not None and weight in self._whole.state:
                own = self._whole.state[weight]
                found["steps"][name] = int(own["step"].item())
                kept = [own["exp_avg"], own["exp_avg_sq"]]
            else:
                continue
            for group, moment in zip(_GROUPS, kept, strict=False):
                found[group][name] = moment.detach().to("cpu", copy=True)
        return found

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where another left off; TrainingError, and nothing changed, if it had other weights or moments."""
        saved = {
            name: [state[group][name] for group in _GROUPS if name in state.get(group, ())] for name in state["steps"]
        }
        for name, moments in saved.items():
            if [moment.shape for moment in moments] != self._shapes(name):
                raise TrainingError(
                    f"The state of the optimiser is of other weights, such as '{name}', or of another optimiser."
                )
        if self._whole is not None:
            self._whole.state.clear()
        self._steps = {name: made for name, made in state["steps"].items() if name in self._quantised}
        for name, moments in saved.items():
            if name in self._quantised:
                mean, root = self._quantised[name]
                for target, moment in zip((mean.codes, root.codes, mean.scales, root.scales), moments, strict=True):
                    target.copy_(moment)
            elif self._whole is not None:
                weight = self.weights[name]
                own = (torch.zeros_like(weight, memory_format=torch.preserve_format).copy_(one) for one in moments)
                self._whole.state[weight] = self._moments(weight, state["steps"][name], *own)

    def _shapes(self, name: str) -> list[torch.Size]:
        """Of the moments of a weight in a state; none if there is no such weight."""
        if name not in self._quantised:
            return [self.weights[name].shape] * 2 if name in self.weights else []
        mean, root = self._quantised[name]
        return [mean.codes.shape, root.codes.shape, mean.scales.shape, root.scales.shape]


class Quantised:
    """As many numbers as some tensor has, in its order; zeros at first."""

    def __init__(self, count: int, *, is_signed: bool, device: torch.device) -> None:
        """Make room.

        Args:
            count: How many numbers.
            is_signed: Numbers that cannot be negative have twice the precision, and none of them becomes 0, for
                something is divided by them.
            device: Where they are.
        """
        self.count = count
        blocks = -(-count // BLOCK)
        self.codes = torch.zeros((blocks, BLOCK), dtype=torch.uint8, device=device)
        self.scales = torch.zeros((blocks, 1), device=device)
        """The largest number of each block."""
        self._values = _table(is_signed).to(device)
        self._bounds = (self._values[1:] + self._values[:-1]) / 2
        self._least_code = 0 if is_signed else 1

    def slices(self) -> Iterator[slice]:
        """All numbers in parts, for `read` and `write`."""
        size = _SLICE_BLOCKS * BLOCK
        return (slice(start, min(start + size, self.count)) for start in range(0, self.count, size))

    def read(self, part: slice) -> Tensor:
        """A slice of the numbers, in 32 bits."""
        blocks = _blocks(part)
        values = self._values[self.codes[blocks].int()].mul_(self.scales[blocks])
        return values.view(-1)[: part.stop - part.start]

    def write(self, part: slice, values: Tensor) -> None:
        """Replace a slice of the numbers, each by the nearest that there is."""
        blocks = _blocks(part)
        rows = functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        scales = rows.abs().amax(-1, keepdim=True)
        codes = torch.bucketize(rows / scales.clamp(min=torch.finfo(scales.dtype).tiny), self._bounds, out_int32=True)
        self.codes[blocks] = codes.clamp_(min=self._least_code).to(torch.uint8)
        self.scales[blocks] = scales


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def _table(is_signed: bool) -> Tensor:
    """The 256 values, from the lowest to 1."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade if is_signed else decade + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - DECADES + 1)).tolist()
        values += middles + ([-value for value in middles] if is_signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)
