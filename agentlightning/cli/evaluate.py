"""`agl eval`: how well an agent does on a data set, with a trained model, any endpoint, or a prompt."""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from rich.console import Console

from agentlightning.algorithm import Algorithm
from agentlightning.algorithm.batches import Batches, Score, score_of
from agentlightning.algorithm.intervals import FailedChoice, FailedReward, check_failed_reward
from agentlightning.algorithm.utils import report_metrics
from agentlightning.cli.arguments import CommandParser, amount, named_path, positive_number, seconds, whole_number
from agentlightning.cli.export_model import Choice, check_model, export, is_checkpoints
from agentlightning.cli.runner import loaded_agent
from agentlightning.cli.store_address import is_remote, path_of
from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy import LLMProxy, ModelConfig
from agentlightning.logging import setup
from agentlightning.trainer import Trainer
from agentlightning.types import Dataset, NamedResources, PromptTemplate, RolloutConfig
from agentlightning.utils.installation import install_command

__all__ = ["main"]

DEFAULT_CONCURRENCY: Final = 16
DEFAULT_TIMEOUT: Final = 600.0
MOST_ERRORS: Final = 3
_KEY_VARIABLE: Final = "OPENAI_API_KEY"

EXAMPLES = """\
examples:
  agl eval tiny --agent calc_agent:solve --data tasks.jsonl                   the model in this package
  agl eval calc/checkpoints --best --agent calc_agent:solve --data tasks.jsonl     what a training has reached
  agl eval http://127.0.0.1:8000/v1 --model qwen --agent my_agent:run --data tasks.jsonl --n 200
  agl eval http://127.0.0.1:8000/v1 --model qwen --prompt better.txt --agent my_agent:run --data tasks.jsonl

The data has a task in JSON on each line. A rollout that fails counts as the worst reward, which is 0 or the smallest of
the others if that is negative; --failed says otherwise.
The key of an endpoint is taken from OPENAI_API_KEY.
"""


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="agl eval",
        description="Run an agent on a data set and tell the mean reward, with a 95 % interval.",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "target", metavar="MODEL_OR_ENDPOINT", help="tiny, smollm2, a folder with a model or checkpoints, or a URL"
    )
    parser.add_argument("--agent", required=True, metavar="MODULE:AGENT", help="a function, or a LitAgent")
    parser.add_argument(
        "--data", required=True, type=named_path, metavar="FILE", help="tasks, one in JSON on each line"
    )
    parser.add_argument("--n", type=positive_number, metavar="N", help="the first so many tasks; all by default")
    parser.add_argument("--model", metavar="NAME", help="what the endpoint calls the model")
    parser.add_argument("--temperature", type=amount, default=0.0, help="of every call (default: %(default)s)")
    parser.add_argument(
        "--failed",
        type=_failed_reward,
        default="worst",
        metavar="worst|skip|NUMBER",
        help="what a rollout that failed counts (default: %(default)s)",
    )
    parser.add_argument("--prompt", type=named_path, metavar="FILE", help="given to the agent as prompt_template")
    parser.add_argument("--store", metavar="FILE", help="SQLite file to keep what happened in; forgotten by default")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="of checkpoints, the best by validation")
    which.add_argument("--step", type=whole_number, metavar="N", help="of checkpoints, the one after this step")
    parser.add_argument("--policy", metavar="NAME", help="of checkpoints of several models, this one's")
    parser.add_argument(
        "--runners", type=positive_number, default=1, help="processes that run the agent (default: %(default)s)"
    )
    parser.add_argument(
        "--concurrency",
        type=positive_number,
        default=DEFAULT_CONCURRENCY,
        help="rollouts at once in each (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=DEFAULT_TIMEOUT, help="seconds a rollout may take (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="for a model served here (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--log-level", default="ERROR", help="DEBUG, INFO, WARNING or ERROR (default: %(default)s)")
    return parser


def _failed_reward(text: str) -> FailedReward:
    choices: dict[str, FailedReward] = {choice: choice for choice in get_args(FailedChoice)}
    try:
        value = choices[text] if text in choices else float(text)
        check_failed_reward("it", value)
    except ValueError as error:  # which a ConfigurationError is
        raise argparse.ArgumentTypeError(f"{text!r} is neither {', '.join(choices)} nor a finite number") from error
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and tell; returns the exit code."""
    arguments = _parser().parse_args(argv)
    # Failed rollouts stand in the report, and what ends the evaluation is the last line.
    told_here = ("agentlightning.runner.failures", "agentlightning.trainer.trainer")
    setup(arguments.log_level.upper(), submodule_levels=dict.fromkeys(told_here, "CRITICAL"))
    if not is_remote(arguments.target) and not is_checkpoints(Path(arguments.target)):
        check_model(arguments.target)
    tasks = _tasks(arguments.data)[: arguments.n]
    agent = loaded_agent(arguments.agent)
    evaluation = EvaluationRun(
        _resources(arguments.prompt), arguments.temperature, arguments.timeout, failed=arguments.failed
    )
    began = time.monotonic()
    with _served(arguments) as model:
        evaluation.model = model
        trainer = Trainer(
            algorithm=evaluation,
            store="memory" if arguments.store is None else f"sqlite:///{path_of(arguments.store)}",
            n_runners=arguments.runners,
            strategy={"type": "cs", "server_port": 0},
            runner={"type": "agentlightning.LitAgentRunner", "max_concurrency": arguments.concurrency},
            name="eval",
            progress="off",
        )
        trainer.fit(agent, val_dataset=tasks)
    if evaluation.score is None:  # Ctrl-C ends a training, and not with an error
        raise KeyboardInterrupt
    _report(arguments, evaluation.score, time.monotonic() - began)
    return 0


# ---------------------------------------------------------------------- evaluating


@dataclass
class EvaluationRun(Algorithm):
    """Sends every task once, and scores what comes back."""

    resources: NamedResources
    temperature: float
    timeout_seconds: float
    failed: FailedReward = "worst"
    model: ModelConfig | None = None
    score: Score | None = None
    """None until it is over."""

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        assert self.model is not None
        assert val_dataset is not None
        proxy = LLMProxy(store=self.get_store(), model_list=[self.model], journal=False)
        proxy.start()
        try:
            sampling = {"temperature": self.temperature}
            llm = proxy.as_resource(model=self.model["model_name"], sampling_parameters=sampling)
            update = await self.get_store().add_resources({**self.resources, "main_llm": llm})
            batches = Batches(self.get_store(), RolloutConfig(timeout_seconds=self.timeout_seconds))
            sent = await batches.send(val_dataset, mode="val", resources_id=update.resources_id)
            self.score = score_of(await batches.gather(sent, with_spans=False), self.failed)
            await report_metrics(self, 0, self.score.metrics())
        finally:
            await proxy.stop()


# ---------------------------------------------------------------------- what is evaluated


@contextlib.contextmanager
def _served(arguments: argparse.Namespace) -> Iterator[ModelConfig]:
    """The model as the proxy is told of it; one of our own is served as long as the block lasts."""
    if is_remote(arguments.target):
        yield _endpoint(arguments.target, arguments.model)
        return
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("safetensors") is None:
        raise ConfigurationError(f"The engine needs torch: run `{install_command('train')}`.")
    from agentlightning.engine.embedded import EngineServer

    with tempfile.TemporaryDirectory(prefix="agl-eval-") as folder:
        source = arguments.target
        if is_checkpoints(Path(source)):
            choice = Choice(arguments.step, arguments.best, arguments.policy)
            export(Path(source), Path(folder) / "model", choice)
            source = str(Path(folder) / "model")
        with EngineServer(source, name=arguments.model, device=arguments.device) as engine:
            entry = engine.model_config()
            yield ModelConfig(model_name=entry["model_name"], litellm_params=entry["litellm_params"])


def _endpoint(url: str, model: str | None) -> ModelConfig:
    if model is None:
        raise ConfigurationError(f"What does '{url}' call the model? Say it with --model.")
    parameters = {"model": f"openai/{model}", "api_base": url, "api_key": os.environ.get(_KEY_VARIABLE, "unused")}
    return ModelConfig(model_name=model, litellm_params=parameters)


def _resources(prompt: Path | None) -> NamedResources:
    if prompt is None:
        return {}
    try:
        return {"prompt_template": PromptTemplate(template=prompt.read_text(encoding="utf-8"), engine="f-string")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The prompt '{prompt}' cannot be read: {error}") from error


def _tasks(path: Path) -> list[Any]:
    """The lines of a file, empty ones left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The data '{path}' cannot be read: {error}") from error
    tasks: list[Any] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(json.loads(line))
            except ValueError as error:
                raise ConfigurationError(f"Line {number} of '{path}' is not JSON: {error}") from error
    if not tasks:
        raise ConfigurationError(f"There are no tasks in '{path}'; write one in JSON on each line.")
    return tasks


# ---------------------------------------------------------------------- telling


def _report(arguments: argparse.Namespace, found: Score, seconds: float) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    reward = found.reward
    if arguments.json:
        told = {
            "target": arguments.target,
            "mean": reward.mean,
            "low": reward.low if math.isfinite(reward.low) else None,
            "high": reward.high if math.isfinite(reward.high) else None,
            "n": reward.n,
            "failed": found.failed,
            "failed_reward": reward.failed_reward,
            "errors": dict(found.errors),
            "seconds": round(seconds, 3),
            "store": arguments.store,
        }
        console.print(json.dumps(told))
        return
    interval = f"95 % interval {reward.low:.3f} to {reward.high:.3f}"
    if not math.isfinite(reward.low):
        interval = "no interval, because rewards are all the same"
    console.print(f"reward {reward.mean:.3f}, {interval}, n = {reward.n}")
    console.print(f"{reward.failed_words}, {seconds:.0f} s")
    for error, count in found.errors.most_common(MOST_ERRORS):
        console.print(f"  {count} times: {error}")
