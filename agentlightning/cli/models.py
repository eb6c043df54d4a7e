"""The models that a command is told to serve: written as `NAME=WHERE`, in a file as LiteLLM has them, or left open.

Keys of providers are never arguments, which `ps` shows: they come from the environment, under the names that the
providers' own SDKs use.
"""

import argparse
import importlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agentlightning.cli.command import Argument, amount, argument, named_path, whole_number
from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy import Budget, ModelConfig

FORMS: Final = (
    "NAME=http://host:port/v1 for a server that speaks as OpenAI's does, NAME=provider/model@URL for another, or "
    "NAME=provider/model for the provider's own address"
)
_AT_URL: Final = re.compile(r"@(?=https?://)")
_OPENAI: Final = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE")
_BUDGETS: Final[Mapping[str, Callable[[str], float]]] = {"calls": whole_number, "tokens": whole_number, "cost": amount}


@dataclass(frozen=True)
class Models:
    """What a proxy is to serve."""

    entries: list[ModelConfig]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The rest of LiteLLM's file."""


def budget_arguments(prefix: str, words: str) -> list[Argument]:
    """Options that limit what may be spent, which `budget_of` reads.

    Args:
        words: What stands behind the name of the limit in the help.
    """
    return [
        argument(f"--{prefix}-{name}", type=kind, metavar="N", help=f"{'money' if name == 'cost' else name} {words}")
        for name, kind in _BUDGETS.items()
    ]


MODEL_ARGUMENTS: Final = (
    argument(
        "--model",
        action="append",
        metavar="NAME=WHERE",
        default=[],
        help="a model: NAME=URL, NAME=provider/model@URL or NAME=provider/model; may be repeated, also for one name",
    ),
    argument(
        "--config", type=named_path, metavar="FILE", help="models in a file, YAML or JSON, with LiteLLM's model_list"
    ),
    *budget_arguments("max", "each rollout may spend; no limit by default"),
)
"""Options by which models, and what may be spent on them, are said."""


def budget_of(arguments: argparse.Namespace, prefix: str = "max") -> Budget | None:
    """What the options of this prefix allow; None is no limit."""
    given = {name: getattr(arguments, f"{prefix}_{name}") for name in _BUDGETS}
    return None if all(value is None for value in given.values()) else Budget(**given)


def models_of(arguments: argparse.Namespace) -> Models:
    """The models of the options; there may be none."""
    entries = [_entry(text) for text in arguments.model]
    if arguments.config is None:
        return Models(entries)
    config = _read(arguments.config)
    listed = config.pop("model_list", None) or []
    if not isinstance(listed, list):
        raise ConfigurationError(
            f"model_list in '{arguments.config}' is of type {type(listed).__name__}; it must be a list."
        )
    return Models([*listed, *entries], config)


def _entry(text: str) -> ModelConfig:
    name, equals, where = text.partition("=")
    if not equals or not name or not where:
        raise ConfigurationError(f"--model {text} does not say where the model is; write {FORMS}.")
    if where.startswith(("http://", "https://")):
        return {"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_base": where}}
    model, *urls = _AT_URL.split(where, maxsplit=1)
    if "://" in model or "/" not in model:
        raise ConfigurationError(f"--model {text} names no provider; write {FORMS}.")
    return {"model_name": name, "litellm_params": {"model": model, **({"api_base": urls[0]} if urls else {})}}


def _read(path: Path) -> dict[str, object]:
    """The mapping in a file of YAML or JSON."""
    is_yaml = path.suffix in (".yaml", ".yml")
    try:
        text = path.read_text(encoding="utf-8")
        config = importlib.import_module("yaml").safe_load(text) if is_yaml else json.loads(text)
    except ImportError as error:
        raise ConfigurationError(
            f"--config '{path}' is YAML, which needs PyYAML: `pip install pyyaml`, or write it as JSON."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config '{path}' cannot be read: {error}.") from error
    except Exception as error:  # of the parser
        reason = " ".join(str(error).split())
        way_out = "" if is_yaml else "; a file of YAML ends in .yaml or .yml"
        kind = "YAML" if is_yaml else "JSON"
        raise ConfigurationError(f"--config '{path}' is no {kind}: {reason}{way_out}.") from error
    if not isinstance(config, dict):
        raise ConfigurationError(
            f"--config '{path}' holds a value of type {type(config).__name__}; it must be a mapping."
        )
    return config


# ---------------------------------------------------------------------- for programs that name their own models


def passed_through() -> Models:
    """Every model, at the providers that the environment names, under the names that a program uses."""
    anthropic: dict[str, object] = {"model": "anthropic/claude-*"}
    token = os.environ.get("ANTHROPIC_AUTH_TOKEN")
    if token and not os.environ.get("ANTHROPIC_API_KEY"):
        anthropic["extra_headers"] = {"Authorization": f"Bearer {token}"}
    others: dict[str, object] = {"model": "openai/*"}
    if _is_set(("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL")) and not _is_set(_OPENAI):
        others = {**anthropic, "model": "anthropic/*"}
    return Models(
        [
            {"model_name": "claude-*", "litellm_params": anthropic},
            {"model_name": "*", "litellm_params": others},
        ]
    )


def _is_set(variables: Sequence[str]) -> bool:
    return any(os.environ.get(variable) for variable in variables)
