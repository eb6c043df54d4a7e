"""`python -m agentlightning.verl key=value …`: a training that serves a store, and waits for runners to join."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from agentlightning.algorithm.verl import compose
from agentlightning.algorithm.verl.launch import run_ppo
from agentlightning.errors import ConfigurationError, TrainingError

__all__ = ["main", "run_ppo"]


def main(argv: Sequence[str] | None = None) -> int:
    """Train with verl; 0 when it is done, 2 where something is missing or the training failed, which is then told."""
    parser = argparse.ArgumentParser(prog="python -m agentlightning.verl", description="Train with verl, on GPUs.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="verl's settings, such as data.seed=1")
    arguments = parser.parse_args(argv)
    try:
        config = compose(_nested(arguments.overrides))
        port = config["agentlightning"]["port"]
        sys.stderr.write(f"Start the agents with: agl runner MODULE:AGENT --store http://127.0.0.1:{port}\n")
        run_ppo(config, None, None, store=None, llm_proxy=None, adapter=None)
    except (ConfigurationError, TrainingError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _nested(overrides: Sequence[str]) -> dict[str, Any]:
    """`a.b=1` as {"a": {"b": 1}}; values are YAML, and a plus before a new key is allowed, as in Hydra."""
    yaml = importlib.import_module("yaml")
    result: dict[str, Any] = {}
    for override in overrides:
        name, has_value, text = override.lstrip("+").partition("=")
        if not has_value or not all(name.split(".")):
            raise ConfigurationError(f"'{override}' is no setting; write it as key=value, such as data.seed=1.")
        *path, last = name.split(".")
        place = result
        for step in path:
            below = place.setdefault(step, {})
            if not isinstance(below, dict):
                raise ConfigurationError(f"'{override}' is below a setting that has a value already.")
            place = below
        try:
            place[last] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigurationError(f"The value of '{override}' cannot be read: {error}") from error
    return result
