"""A tiny model on disk: the folder of a Hugging Face model, and in it `tiny.json`, by which `load` knows it.

transformers and vLLM load the folder as the Starcoder2 that it is; see `starcoder2.py`. The weights are there once. A
folder with `weights.safetensors`, in which they have the names of `TinyModel`, is read as well.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from agentlightning.engine.tiny import starcoder2
from agentlightning.engine.tiny.model import TinyModel, TinyShape
from agentlightning.engine.tiny.tokenizer import VOCABULARY_SIZE
from agentlightning.errors import EngineError

__all__ = ["DESCRIPTION_FILE", "SHIPPED_FOLDER", "WEIGHTS_FILE", "load_tiny", "save_tiny"]

DESCRIPTION_FILE: Final = "tiny.json"
WEIGHTS_FILE: Final = "model.safetensors"
SHIPPED_FOLDER: Final = Path(__file__).parent
"""Where the weights of the package lie."""
_BARE_WEIGHTS_FILE: Final = "weights.safetensors"
_FORMAT: Final = 1


def load_tiny(folder: Path = SHIPPED_FOLDER, *, device: str | torch.device = "cpu") -> TinyModel:
    """The model of a folder, by default the one that travels in the package."""
    description = _described(folder)
    try:
        shape = TinyShape(**description["shape"])
        with torch.random.fork_rng(devices=[]):
            model = TinyModel(shape, name=str(description["name"]))
        weights = _weights(folder, shape)
    except EngineError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        raise EngineError(f"The folder '{folder}' holds no tiny model that can be read: {error!r}.") from error
    if shape.vocab_size != VOCABULARY_SIZE:
        raise EngineError(
            f"The model in '{folder}' has {shape.vocab_size} tokens; this release reads models of {VOCABULARY_SIZE}."
        )
    model.load_state(weights)
    return model.to(device)


def save_tiny(model: TinyModel, folder: Path, *, extra: Mapping[str, Any] | None = None) -> None:
    """Write a model into a folder; `extra` is kept in its description. Not atomic: the caller renames the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    description = {
        "format": _FORMAT,
        "name": model.name,
        "shape": dataclasses.asdict(model.shape),
        **({"extra": dict(extra)} if extra else {}),
    }
    weights = starcoder2.to_starcoder2(model.state(), model.shape)
    (folder / WEIGHTS_FILE).write_bytes(save(weights, metadata={"format": "pt"}))  # without which transformers refuses
    (folder / _BARE_WEIGHTS_FILE).unlink(missing_ok=True)  # an older copy, if the folder had one
    for name, text in starcoder2.described_files(model.shape).items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / DESCRIPTION_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _weights(folder: Path, shape: TinyShape) -> dict[str, torch.Tensor]:
    if (folder / _BARE_WEIGHTS_FILE).is_file() and not (folder / WEIGHTS_FILE).is_file():
        return load_file(folder / _BARE_WEIGHTS_FILE)
    return starcoder2.from_starcoder2(load_file(folder / WEIGHTS_FILE), shape)


def _described(folder: Path) -> dict[str, Any]:
    try:
        description = json.loads((folder / DESCRIPTION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"The folder '{folder}' holds no readable {DESCRIPTION_FILE}: {error}.") from error
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise EngineError(f"'{folder / DESCRIPTION_FILE}' is not of format {_FORMAT}, which this release reads.")
    return description
