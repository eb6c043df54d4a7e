"""Checkpoints of a run: folders on disk that are there whole or not at all.

    step-000040/
        model.safetensors   the weights
        optimiser.pt        the learner's state, and the random sources of Python and torch
        state.json          the step, what the caller calls progress, and the size and digest of the two files
    latest                  the name of the newest folder
    best                    the name of the best one

A folder is written under another name, brought to the disk, and then renamed, so that a process that is killed leaves
either the new checkpoint or the ones before it. It never takes the place of another: the second of the same step is
step-000040-2. What was cut short by a power failure is found by its digest and passed over with a warning.
"""

import hashlib
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import safetensors.torch
import torch
from torch import Tensor

from agentlightning.engine.model import CausalModel
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.utils.private_files import bring_to_disk

logger = logging.getLogger(__name__)

FORMAT: Final = 2
_MODEL: Final = "model.safetensors"
_LEARNER: Final = "optimiser.pt"
_STATE: Final = "state.json"
_FILES: Final = (_MODEL, _LEARNER)
_LATEST: Final = "latest"
_BEST: Final = "best"
_NAME: Final = re.compile(r"step-(\d{6,})(?:-(\d+))?")
_UNFINISHED: Final = ".unfinished-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole; its files are read when they are asked for."""

    folder: Path
    step: int
    progress: dict[str, Any]
    """What the caller gave when it was saved."""

    def model_state(self) -> dict[str, Tensor]:
        """The weights, on the CPU."""
        return safetensors.torch.load_file(self.folder / _MODEL)

    def learner_state(self) -> dict[str, Any]:
        """What `Learner.load_state` takes."""
        state: dict[str, Any] = self._saved()["learner"]
        return state

    def restore_random_sources(self) -> None:
        """Set Python's and torch's own sources of chance to where they were; the learner's is in its state."""
        saved = self._saved()
        version, internal, gauss = saved["python"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(saved["torch"])
        if torch.cuda.is_available() and len(saved["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(saved["cuda"])

    def _saved(self) -> dict[str, Any]:
        saved: dict[str, Any] = torch.load(self.folder / _LEARNER, map_location="cpu", weights_only=True)
        return saved


class Checkpoints:
    """The checkpoints of one run in a folder; one process writes them."""

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        """Nothing is made on disk before the first `save`.

        Args:
            folder: Where they are, or will be.
            keep: How many of the newest are kept; the best is kept beside them.
        """
        if keep < 1:
            raise ConfigurationError(f"keep is {keep}; at least one checkpoint must be kept.")
        self.folder = Path(folder)
        self.keep = keep

    def save(
        self,
        step: int,
        *,
        model_state: Mapping[str, Tensor],
        learner_state: Mapping[str, object],
        progress: Mapping[str, object],
        is_best: bool = False,
    ) -> Path:
        """Write a checkpoint, and remove those that are not kept; its folder.

        An earlier one of the same step is removed. TrainingError if the disk does not take it; the others stay.

        Args:
            step: Steps made.
            model_state: The weights, as `CausalModel.state()` gives them.
            learner_state: As `Learner.state()` gives it.
            progress: What the caller needs to go on, such as the place in the data set; JSON.
            is_best: Whether `best` names this one from now on.
        """
        revisions = [_order(name)[1] for name in self._names() if _order(name)[0] == step]
        target = self.folder / (f"step-{step:06d}-{max(revisions) + 1}" if revisions else f"step-{step:06d}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            beside = self.folder / f"{_UNFINISHED}{uuid4().hex}"
            beside.mkdir()
            try:
                _write(beside, step, model_state, learner_state, progress)
                beside.rename(target)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
            self._point(_LATEST, target.name)
            if is_best:
                self._point(_BEST, target.name)
            self._remove_old(target.name)
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:  # torch has no kind of its own for a disk
            if isinstance(error, TrainingError):
                raise
            place = next(place for place in (self.folder, *self.folder.absolute().parents) if place.exists())
            free = f"{shutil.disk_usage(place).free} bytes are free there"
            raise TrainingError(
                f"The checkpoint of step {step} cannot be written to '{target}' ({free}): {error}"
            ) from error
        return target

    def set_aside(self) -> None:
        """Move what an earlier run left to a folder `earlier-1`, or the next number, beside this one.

        Checkpoints of several models that lie beside each other are together there too, and can be resumed from.
        """
        if self._names():
            places = (self.folder.parent / f"earlier-{number}" / self.folder.name for number in count(1))
            target = next(place for place in places if not place.exists())
            target.parent.mkdir(exist_ok=True)
            self.folder.rename(target)
            logger.warning("This run began anew: the checkpoints of the one before are in '%s' now.", target.parent)

    def latest(self) -> Checkpoint | None:
        """The newest one that is whole; None if there is none.

        The pointer is believed before the numbers: later steps may be of a course that was given up.
        """
        return self._first_whole(self._newest_first())

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, in the order in which `latest` would take them; not all may be whole.

        Who keeps several models in step, each with its own checkpoints, finds here the newest that all have.
        """
        return list(dict.fromkeys(_order(name)[0] for name in self._newest_first()))

    def at(self, step: int) -> Checkpoint | None:
        """The last one of a step; None if there is none that is whole."""
        return self._first_whole(name for name in self._names() if _order(name)[0] == step)

    def best(self) -> Checkpoint | None:
        """The one that was last called best; None if none was, or it is not whole."""
        name = self._pointed(_BEST)
        return None if name is None else self._first_whole([name])

    def _first_whole(self, names: Iterable[str]) -> Checkpoint | None:
        for name in names:
            try:
                return _read(self.folder / name)
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("The checkpoint '%s' is passed over, for it is not whole: %s", self.folder / name, error)
        return None

    def _names(self) -> list[str]:
        """The folders of checkpoints, from the highest step down."""
        entries = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted((entry for entry in entries if _NAME.fullmatch(entry)), key=_order, reverse=True)

    def _newest_first(self) -> list[str]:
        names, pointed = self._names(), self._pointed(_LATEST)
        if pointed is None:
            return names
        return sorted(names, key=lambda name: _order(name) > _order(pointed))  # else as they are

    def _pointed(self, pointer: str) -> str | None:
        try:
            name = (self.folder / pointer).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return name if _NAME.fullmatch(name) and (self.folder / name).is_dir() else None

    def _point(self, pointer: str, name: str) -> None:
        beside = self.folder / f"{_UNFINISHED}{pointer}"
        beside.write_text(f"{name}\n", encoding="utf-8")
        bring_to_disk(beside)
        beside.replace(self.folder / pointer)
        bring_to_disk(self.folder)

    def _remove_old(self, newest: str) -> None:
        """Leave the newest ones, the best, and those of later steps; what killed writers left behind goes too."""
        best, last = self._pointed(_BEST), _order(newest)
        earlier = {_order(name)[0]: name for name in reversed(self._names()) if _order(name) <= last}
        kept = {earlier[step] for step in sorted(earlier, reverse=True)[: self.keep]}
        for entry in os.listdir(self.folder):
            is_old = _NAME.fullmatch(entry) and _order(entry) < last and entry not in kept and entry != best
            path = self.folder / entry
            if path.is_dir() and (is_old or entry.startswith(_UNFINISHED)):
                shutil.rmtree(path, ignore_errors=True)


def _order(name: str) -> tuple[int, int]:
    """Step and revision of a folder."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _write(
    folder: Path,
    step: int,
    model_state: Mapping[str, Tensor],
    learner_state: Mapping[str, object],
    progress: Mapping[str, object],
) -> None:
    state: dict[str, Any] = {"format": FORMAT, "step": step, "progress": dict(progress)}
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise TrainingError(f"The progress of step {step} cannot be written as JSON: {error}") from error
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in model_state.items()}
    safetensors.torch.save_file(plain, folder / _MODEL)
    (folder / _MODEL).chmod(0o644)  # which safetensors lets nobody else read
    saved = {
        "learner": dict(learner_state),
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    torch.save(saved, folder / _LEARNER)
    state["files"] = {
        name: {"bytes": (folder / name).stat().st_size, "digest": _digest(folder / name)} for name in _FILES
    }
    (folder / _STATE).write_text(json.dumps(state, indent=2), encoding="utf-8")
    for name in (*_FILES, _STATE):
        bring_to_disk(folder / name)
    bring_to_disk(folder)


def _read(folder: Path) -> Checkpoint:
    """ValueError, or what reading raises, if it is not whole."""
    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    if state["format"] != FORMAT:
        raise ValueError(f"its format is {state['format']}, not {FORMAT}")
    for name in _FILES:
        listed, path = state["files"][name], folder / name
        if path.stat().st_size != listed["bytes"] or _digest(path) != listed["digest"]:
            raise ValueError(f"'{name}' is not what was written")
    return Checkpoint(folder, int(state["step"]), dict(state["progress"]))


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def adapters_of(model: CausalModel) -> dict[str, Tensor]:
    """Copies of the trained weights that are merged into others in the model's state."""
    published, weights = model.state_shapes(), model.trainable().items()
    return {name: weight.detach().to("cpu", copy=True) for name, weight in weights if name not in published}


def digest_of(folder: Path) -> str:
    """Stands for a folder: a run that goes on from it knows by this what an earlier one left in the store."""
    return hashlib.blake2b(str(folder.absolute()).encode(), digest_size=6).hexdigest()
