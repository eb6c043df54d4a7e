"""Models on disk: a folder that is there whole or not at all, and that `load` takes back.

It is the folder of a Hugging Face model, which transformers, vLLM and others load as well; adapters are merged. That of
a tiny model has `tiny.json` in it besides.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from agentlightning.engine.codec import ChatCodec
from agentlightning.engine.hf import HfModel
from agentlightning.engine.hf_codec import HfChatCodec
from agentlightning.engine.model import CausalModel
from agentlightning.engine.tiny.files import save_tiny
from agentlightning.engine.tiny.model import TinyModel
from agentlightning.errors import ConfigurationError, EngineError
from agentlightning.utils.disk import bring_to_disk

__all__ = ["EXTRA_FILE", "check_replaceable", "read_extra", "save_model"]

EXTRA_FILE: Final = "agentlightning.json"
MODEL_FILES: Final = ("tiny.json", "config.json", EXTRA_FILE)
"""One of these is in every folder with a model: ours, and Hugging Face's."""
_READABLE: Final = 0o644


def save_model(model: CausalModel, codec: ChatCodec, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
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
        _write(model, codec, beside)
        (beside / EXTRA_FILE).write_text(json.dumps(dict(extra or {}), indent=2) + "\n", encoding="utf-8")
        _settle(beside)
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


def read_extra(folder: Path) -> dict[str, Any]:
    """The notes that were saved with a model; none for a folder of somebody else's."""
    path = folder / EXTRA_FILE
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise EngineError(f"The notes '{path}' cannot be read: {error}") from error


def _write(model: CausalModel, codec: ChatCodec, folder: Path) -> None:
    if isinstance(model, TinyModel):
        save_tiny(model, folder)
    elif isinstance(model, HfModel):
        model.save(folder)
        if isinstance(codec, HfChatCodec):
            codec.tokenizer.save_pretrained(folder)
    else:
        raise EngineError(f"A model of the kind {type(model).__name__} cannot be saved.")


def _settle(folder: Path) -> None:
    """Everything is on the disk, and readable for others, as files usually are."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(_READABLE)
            bring_to_disk(path)
    bring_to_disk(folder)


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
