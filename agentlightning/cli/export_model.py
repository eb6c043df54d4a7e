"""`agl export-model`: a checkpoint of a training becomes a folder that `agl serve`, transformers or vLLM loads."""

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from agentlightning.cli.command import (
    argument,
    cli_command,
    named_path,
    one_of,
    whole_number,
)
from agentlightning.engine.embedded import MODEL_FILES, NAMED_MODELS
from agentlightning.errors import ConfigurationError
from agentlightning.utils.installation import install_command

if TYPE_CHECKING:
    from agentlightning.algorithm.grpo.checkpoints import Checkpoint
    from agentlightning.engine.model import CausalModel

STEP_FOLDERS: Final = "step-*"


@dataclass(frozen=True)
class Choice:
    """Which of the checkpoints in a folder is meant."""

    step: int | None = None
    is_best: bool = False
    policy: str | None = None
    base: str | None = None
    """The model that was trained; None takes the one that the checkpoint names."""
    dtype: str | None = None
    """Of the weights that are written; None writes each as exact as it is."""


@cli_command(
    "export-model",
    description="Write a trained model as a folder of its own.",
    examples="""\
examples:
  agl export-model calc/checkpoints model            the newest checkpoint of a training
  agl export-model calc/checkpoints model --best     the one that did best in validation
  agl export-model calc/checkpoints model --step 40
  agl export-model run/checkpoints solver --policy solver       of a training with several models
  agl export-model tiny model                        the model in this package
  agl export-model model small --dtype bfloat16      half as large, for a server that samples with 16 bits
  agl serve model                                    serve it; so does: vllm serve model

The folder is that of a Hugging Face model, which transformers and vLLM load as well: safetensors, with adapters merged
into the weights, a tokenizer and its chat template. A tiny model is written as a Starcoder2. Nothing is downloaded.
""",
    arguments=(
        argument(
            "checkpoint", type=named_path, help="the checkpoints of a training, a folder with a model, tiny or smollm2"
        ),
        argument("out", type=named_path, help="folder for the model; one that is there is replaced if it holds one"),
        one_of(
            argument("--best", action="store_true", help="the best by validation, instead of the newest"),
            argument("--step", type=whole_number, metavar="N", help="the one after this step"),
        ),
        argument("--policy", metavar="NAME", help="which model, where several were trained"),
        argument("--base", metavar="MODEL", help="folder of the model that was trained, if it has moved since"),
        argument(
            "--dtype",
            choices=("bfloat16", "float16"),
            help="write a Hugging Face model in 16 bits, rounded by chance; by default every weight is written exactly",
        ),
    ),
)
def main(arguments: argparse.Namespace) -> None:
    choice = Choice(arguments.step, arguments.best, arguments.policy, arguments.base, arguments.dtype)
    written = export(arguments.checkpoint, arguments.out, choice)
    Console().print(f"{written}\nServe it: agl serve {arguments.out}", markup=False, highlight=False, soft_wrap=True)


def check_torch() -> None:
    """Refuse to go on without what the engine needs."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("safetensors") is None:
        raise ConfigurationError(f"The engine needs torch: run `{install_command('train')}`.")


def export(source: Path, out: Path, choice: Choice) -> str:
    """Write the model of a folder to another; says in a sentence what was written. ConfigurationError if it cannot."""
    check_torch()
    _check_places(source, out)
    from agentlightning.engine.checkpoint import check_replaceable, load, read_extra, save_model

    check_replaceable(out)
    if is_checkpoints(source):
        checkpoint = _chosen(_of_policy(source, choice.policy), choice)
        model, codec = load(choice.base or _base_of(checkpoint), device="cpu")
        model.load_state(checkpoint.model_state())
        notes = {name: checkpoint.progress.get(name) for name in ("version", "best")}
        extra: dict[str, object] = {"step": checkpoint.step, **notes, "source": choice.base or _base_of(checkpoint)}
        what = f"step {checkpoint.step} of '{source}'"
    else:
        if choice.is_best or choice.step is not None or choice.policy is not None:
            raise ConfigurationError(f"'{source}' is a model and has no checkpoints to choose from.")
        model, codec = load(str(source), device="cpu")
        extra, what = read_extra(source), f"the model '{source}'"
    if choice.dtype is not None:
        _round(model, choice.dtype)
    save_model(model, codec, out, extra)
    return f"Wrote {what} to '{out}'."


def _round(model: "CausalModel", dtype: str) -> None:
    import torch

    from agentlightning.engine.hf import HfModel, round_weights

    if not isinstance(model, HfModel):
        raise ConfigurationError(f"The model '{model.name}' is written in 32 bits alone; leave --dtype out.")
    round_weights(model.network, getattr(torch, dtype))


def is_checkpoints(folder: Path) -> bool:
    """Whether it holds checkpoints, of one model or, a folder each, of several."""
    return folder.is_dir() and (_has_steps(folder) or any(_has_steps(below) for below in folder.iterdir()))


def _has_steps(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob(STEP_FOLDERS))


def _check_places(source: Path, out: Path) -> None:
    is_named = str(source) in NAMED_MODELS and not source.exists()
    if not is_named and not source.is_dir():
        raise ConfigurationError(f"There is no folder '{source}'; name the checkpoints of a training, or a model.")
    if not (is_named or is_checkpoints(source) or any((source / name).is_file() for name in MODEL_FILES)):
        raise ConfigurationError(f"'{source}' holds neither checkpoints ({STEP_FOLDERS}) nor a model.")
    if out.exists() and source.resolve().is_relative_to(out.resolve()):
        raise ConfigurationError(f"'{out}' would be written over; name another folder.")


def _of_policy(source: Path, policy: str | None) -> Path:
    """The folder with the checkpoints of one model."""
    if _has_steps(source) and policy is None:
        return source
    names = sorted(below.name for below in source.iterdir() if _has_steps(below))
    if policy is None and len(names) == 1:
        return source / names[0]
    if policy is None or policy not in names:
        raise ConfigurationError(
            f"'{source}' has checkpoints of {', '.join(names) or 'no model of its own name'}; "
            "choose one of these with --policy."
        )
    return source / policy


def _chosen(folder: Path, choice: Choice) -> "Checkpoint":
    from agentlightning.algorithm.grpo.checkpoints import Checkpoints

    checkpoints = Checkpoints(folder)
    if choice.is_best:
        found, wanted = checkpoints.best(), "a best one (a training without validation has none)"
    elif choice.step is not None:
        found, wanted = checkpoints.at(choice.step), f"step {choice.step}"
    else:
        found, wanted = checkpoints.latest(), "any that is whole"
    if found is None:
        steps = ", ".join(map(str, sorted(checkpoints.steps()))) or "none"
        raise ConfigurationError(f"'{folder}' does not have {wanted}; there are the steps {steps}.")
    return found


def _base_of(checkpoint: "Checkpoint") -> str:
    base = checkpoint.progress.get("model")
    if not isinstance(base, str):
        raise ConfigurationError(
            f"The checkpoint '{checkpoint.folder}' does not say which model was trained; name it with --base."
        )
    return base
