"""`agl eval`: how well an agent does on a data set, with a trained model, any endpoint, or a prompt."""

import argparse
import contextlib
import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from rich.console import Console

from agentlightning.algorithm import Algorithm
from agentlightning.algorithm.base import Tasks
from agentlightning.algorithm.batches import Batches, Score, score_of
from agentlightning.algorithm.comparison import FailedChoice, FailedReward, check_failed_reward
from agentlightning.algorithm.utils import report_metrics
from agentlightning.cli import TERMINATED
from agentlightning.cli.command import (
    amount,
    argument,
    cli_command,
    named_path,
    one_of,
    positive_number,
    print_json,
    seconds,
    whole_number,
)
from agentlightning.cli.export_model import Choice, check_torch, export, is_checkpoints
from agentlightning.cli.runner import loaded_agent
from agentlightning.cli.stores import is_remote, path_of
from agentlightning.engine.embedded import check_model
from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy import LLMProxy, ModelConfig
from agentlightning.trainer import Trainer
from agentlightning.trainer.datasets import read_tasks
from agentlightning.types import NamedResources, PromptTemplate, RolloutConfig

MOST_ERRORS: Final = 3


def _failed_reward(text: str) -> FailedReward:
    choices: dict[str, FailedReward] = {choice: choice for choice in get_args(FailedChoice)}
    try:
        value = choices[text] if text in choices else float(text)
        check_failed_reward("it", value)
    except ValueError as error:  # which a ConfigurationError is
        raise argparse.ArgumentTypeError(f"{text!r} is neither {', '.join(choices)} nor a finite number") from error
    return value


@cli_command(
    "eval",
    description="Run an agent on a data set and tell the mean reward, with a 95 % interval.",
    examples="""\
examples:
  agl eval tiny --agent calc_agent:solve --data tasks.jsonl                   the model in this package
  agl eval calc/checkpoints --best --agent calc_agent:solve --data tasks.jsonl     what a training has reached
  agl eval http://127.0.0.1:8000/v1 --model qwen --agent my_agent:run --data tasks.jsonl --n 200
  agl eval http://127.0.0.1:8000/v1 --model qwen --prompt better.txt --agent my_agent:run --data tasks.jsonl

The data has a task in JSON on each line. A rollout that fails counts as the worst reward, which is 0 or the smallest of
the others if that is negative; --failed says otherwise.
The key of an endpoint is taken from OPENAI_API_KEY.
""",
    arguments=(
        argument(
            "target", metavar="MODEL_OR_ENDPOINT", help="tiny, smollm2, a folder with a model or checkpoints, or a URL"
        ),
        argument("--agent", required=True, metavar="MODULE:AGENT", help="a function, or a LitAgent"),
        argument(
            "--data",
            required=True,
            type=named_path,
            metavar="FILE",
            help="tasks, one in JSON on each line; or .json, .csv, .parquet",
        ),
        argument("--n", type=positive_number, metavar="N", help="the first so many tasks; all by default"),
        argument("--model", metavar="NAME", help="name of the model at the endpoint"),
        argument("--temperature", type=amount, default=0.0, help="temperature of every call"),
        argument(
            "--failed",
            type=_failed_reward,
            default="worst",
            metavar="worst|skip|NUMBER",
            help="reward of a rollout that failed",
        ),
        argument("--prompt", type=named_path, metavar="FILE", help="given to the agent as prompt_template"),
        argument("--store", metavar="FILE", help="SQLite file to keep what happened in; forgotten by default"),
        one_of(
            argument("--best", action="store_true", help="take the checkpoint that is best by validation"),
            argument("--step", type=whole_number, metavar="N", help="take the checkpoint after this step"),
        ),
        argument("--policy", metavar="NAME", help="take this model, where a checkpoint has several"),
        argument("--runners", type=positive_number, default=1, help="processes that run the agent"),
        argument("--concurrency", type=positive_number, default=16, help="rollouts at once in each"),
        argument("--timeout", type=seconds, default=600.0, help="seconds a rollout may take"),
        argument("--device", default="auto", help="device of a model that is served here"),
        argument("--json", action="store_true", help="one line of JSON"),
    ),
    log_level="ERROR",
    # Failed rollouts stand in the report, and what ends the evaluation is the last line.
    quiet_loggers=("agentlightning.runner.failures", "agentlightning.trainer.trainer"),
)
def main(arguments: argparse.Namespace) -> None:
    if not is_remote(arguments.target) and not is_checkpoints(Path(arguments.target)):
        check_model(arguments.target)
    data = read_tasks(arguments.data)
    tasks = [data[number] for number in range(min(len(data), arguments.n or len(data)))]
    agent = loaded_agent(arguments.agent)
    resources: NamedResources = {}
    if arguments.prompt is not None:
        template = PromptTemplate(template=_text_of(arguments.prompt, "prompt"), engine="f-string")
        resources = {"prompt_template": template}
    evaluation = EvaluationRun(resources, arguments.temperature, arguments.timeout, failed=arguments.failed)
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
    if evaluation.score is None:  # SIGTERM lets a training return
        raise SystemExit(TERMINATED)
    _report(arguments, evaluation.score, time.monotonic() - began)


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

    async def run(self, train_dataset: Tasks | None = None, val_dataset: Tasks | None = None) -> None:
        assert self.model is not None
        assert val_dataset is not None
        proxy = LLMProxy(store=self.get_store(), model_list=[self.model])
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
        if arguments.model is None:
            raise ConfigurationError(f"What does '{arguments.target}' call the model? Say it with --model.")
        key = os.environ.get("OPENAI_API_KEY", "unused")
        parameters = {"model": f"openai/{arguments.model}", "api_base": arguments.target, "api_key": key}
        yield ModelConfig(model_name=arguments.model, litellm_params=parameters)
        return
    check_torch()
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


def _text_of(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The {what} '{path}' cannot be read: {error}") from error


# ---------------------------------------------------------------------- reporting


def _report(arguments: argparse.Namespace, found: Score, seconds: float) -> None:
    reward = found.reward
    has_interval = math.isfinite(reward.low)
    if arguments.json:
        print_json(
            {
                "target": arguments.target,
                "mean": reward.mean,
                "low": reward.low if has_interval else None,
                "high": reward.high if has_interval else None,
                "n": reward.n,
                "failed": found.failed,
                "failed_reward": reward.failed_reward,
                "errors": dict(found.errors),
                "seconds": round(seconds, 3),
                "store": arguments.store,
            }
        )
        return
    interval = "no interval, because rewards are all the same"
    if has_interval:
        interval = f"95 % interval {reward.low:.3f} to {reward.high:.3f}"
    lines = [f"reward {reward.mean:.3f}, {interval}, n = {reward.n}", f"{reward.failed_words}, {seconds:.0f} s"]
    lines += [f"  {count} times: {error}" for error, count in found.errors.most_common(MOST_ERRORS)]
    Console(highlight=False, markup=False, soft_wrap=True).print("\n".join(lines))
