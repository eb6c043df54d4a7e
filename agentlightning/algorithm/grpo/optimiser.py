"""AdamW over named weights: torch's own, or that of bitsandbytes, which keeps the moments of large weights in 8 bits.

The state is kept by the names of the weights, so that the state of another model is noticed.
"""

import importlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.nn import Parameter

from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.utils.installation import install_command

_FILE_NAMES: Final = {"exp_avg": "mean", "exp_avg_sq": "square"}
"""Of torch's moments in a state; those of bitsandbytes keep their names."""


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
        self._in_8_bits = in_8_bits
        self._is_fused = not in_8_bits and all(weight.device.type in ("cpu", "cuda") for weight in weights.values())
        options: dict[str, Any] = {"betas": betas, "eps": epsilon, "weight_decay": weight_decay}
        if not in_8_bits:
            options["fused"] = self._is_fused
        kind: Any = _bitsandbytes().optim.AdamW8bit if in_8_bits else torch.optim.AdamW
        self._kernel: torch.optim.Optimizer = kind(weights.values(), **options)

    def step(self, learning_rate: float) -> None:
        """Change the weights that have gradients."""
        self._kernel.param_groups[0]["lr"] = learning_rate
        self._kernel.step()

    def forget_gradients(self) -> None:
        """Free what the gradients take."""
        self._kernel.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, beside the weights; a copy, on the CPU."""
        groups: dict[str, Any] = {"steps": {}}
        for name, weight in self.weights.items():
            for key, value in self._kernel.state.get(weight, {}).items():
                if key == "step":
                    groups["steps"][name] = int(value)
                else:
                    group = groups.setdefault(_FILE_NAMES.get(key, key), {})
                    group[name] = value.detach().to("cpu", copy=True)
        return groups

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where another left off; TrainingError, and nothing changed, if it had other weights or moments."""
        moments = state.get("state1" if self._in_8_bits else "mean", {})
        for name in state["steps"]:
            is_known = name in self.weights and name in moments and moments[name].shape == self.weights[name].shape
            if not is_known or (moments[name].dtype == torch.uint8 and not self._in_8_bits):
                raise TrainingError(
                    f"The state of the optimiser is of other weights, such as '{name}', or of another optimiser."
                )
        self._kernel.state.clear()
        keys = {file_name: key for key, file_name in _FILE_NAMES.items()}
        for name, steps in state["steps"].items():
            weight = self.weights[name]
            count = torch.tensor(float(steps), device=weight.device if self._is_fused else None)
            self._kernel.state[weight] = {"step": steps if self._in_8_bits else count}
            for group, values in state.items():
                if group != "steps" and name in values:
                    self._kernel.state[weight][keys.get(group, group)] = values[name].to(weight.device, copy=True)


def _bitsandbytes() -> Any:
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigurationError(
            f"optimiser='adamw8bit' needs the package bitsandbytes: run `{install_command('bitsandbytes')}`."
        ) from error
