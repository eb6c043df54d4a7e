"""`agl proxy`: the LLM proxy as a process of its own, for agents on this machine or on others."""

import argparse
import asyncio
import signal
from typing import Any, Final

from agentlightning.cli.command import (
    argument,
    cli_command,
    port_number,
    say,
    seconds,
    whole_number,
)
from agentlightning.cli.models import FORMS, MODEL_ARGUMENTS, Models, budget_arguments, budget_of, models_of
from agentlightning.cli.stores import open_store, outage_of
from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy import LLMProxy
from agentlightning.llm_proxy.backends import DEFAULT_DEADLINE_SECONDS
from agentlightning.store import LightningStore
from agentlightning.store.http.tokens import refuse_open_address
from agentlightning.utils.server_launcher import ending_signal, tune_process

DEFAULT_PORT: Final = 4749
DEFAULT_RETRIES: Final = 2


@cli_command(
    "proxy",
    description="Serve models to agents, and record every call under its rollout.",
    examples="""\
examples:
  agl proxy --model qwen=http://127.0.0.1:8000/v1 --store http://127.0.0.1:4747
  agl proxy --model qwen=hosted_vllm/Qwen/Qwen2.5-0.5B-Instruct@http://gpu1:8000/v1 --store runs.db
  OPENAI_API_KEY=... agl proxy --model gpt=openai/gpt-4.1-mini --max-tokens 20000 --store runs.db
  agl proxy --config models.yaml --store runs.db           LiteLLM's model_list
  AGL_PROXY_API_KEY=$(agl tokens new) agl proxy --host 0.0.0.0 --model qwen=http://127.0.0.1:8000/v1

Agents call http://127.0.0.1:4749/rollout/ROLLOUT_ID/attempt/ATTEMPT_ID/v1; the resources of a training say so to them.
Keys of providers come from the environment (OPENAI_API_KEY, ANTHROPIC_API_KEY, ...) and never reach an agent.
Ctrl-C lets calls in flight finish and stores them; a second one ends at once.
""",
    arguments=(
        *MODEL_ARGUMENTS,
        *budget_arguments("run-max", "that all may spend together"),
        argument("--store", help="where calls are recorded: http://host:4747, a file, or sqlite:///path"),
        argument("--token", help="token of the store; better given as AGL_STORE_TOKEN, which `ps` hides"),
        argument("--host", default="127.0.0.1", help="address to bind; this machine only by default"),
        argument("--port", type=port_number, default=DEFAULT_PORT, help="0 takes a free one"),
        argument("--access-host", metavar="HOST", help="address that agents are told, if not the bound one"),
        argument("--api-key", help="key that callers must show; better given as AGL_PROXY_API_KEY, which `ps` hides"),
        argument("--insecure", action="store_true", help="bind a public address without a key all the same"),
        argument(
            "--retries",
            type=whole_number,
            metavar="N",
            help=f"of failed calls (default: num_retries of --config, or {DEFAULT_RETRIES})",
        ),
        argument(
            "--deadline",
            type=seconds,
            metavar="SECONDS",
            help="time until an answer begins, retries included (default: request_timeout of --config, or "
            f"{DEFAULT_DEADLINE_SECONDS:g})",
        ),
        argument(
            "--replay",
            action="store_true",
            help="answer calls that an earlier attempt of the rollout made from the record",
        ),
        argument("--raw-spans", action="store_true", help="also store the bodies of calls as they were sent"),
    ),
    log_level="INFO",
)
def main(arguments: argparse.Namespace) -> int:
    api_key = resolve_str_env_var(LightningEnvVar.AGL_PROXY_API_KEY, arguments.api_key) or None
    refuse_open_address(
        *(arguments.host, api_key),
        is_insecure=arguments.insecure,
        at_risk="use your models",
        given_as="AGL_PROXY_API_KEY or --api-key",
    )
    models = models_of(arguments)
    if not models.entries:
        raise ConfigurationError(f"There is no model to serve; give some with --model, as {FORMS}, or with --config.")
    has_budget = budget_of(arguments) is not None
    if has_budget and arguments.store is None and api_key is None:
        raise ConfigurationError(
            "--max-calls, --max-tokens and --max-cost are budgets of each rollout, and without --store there is none; "
            "give the store of the rollouts, or limit all calls together with --run-max-...."
        )
    if arguments.store is None:
        say("proxy", "No --store is given, so calls are kept in memory and forgotten when the proxy ends.")
    outage = outage_of(arguments.store, arguments.token)
    if outage is not None:
        meanwhile = (
            "are refused until it does, since rollouts have budgets" if has_budget else "are served, and wait for it"
        )
        say("proxy", f"The store does not answer; calls {meanwhile}. {outage}")
    store = open_store(arguments.store, arguments.token)
    tune_process()
    try:
        proxy = proxy_of(arguments, models, store, api_key=api_key)
        ended_by = asyncio.run(_serve_until_signal(proxy, arguments.store or "memory"))
    finally:
        asyncio.run(store.close())
    say("proxy", _recorded_calls(proxy))
    return ended_by


def _recorded_calls(proxy: LLMProxy) -> str:
    """What became of the calls of a proxy that has stopped."""
    calls: dict[str, Any] = proxy.status()["calls"]
    lost, unattributed = calls["lost"], calls["unattributed"]
    plural = "" if calls["stored"] == 1 else "s"
    parts = [f"{calls['stored']} model call{plural} stored, {sum(lost.values())} lost"]
    parts += [f"{number} because {reason}" for reason, number in lost.items()]
    if unattributed:
        parts.append(f"{unattributed} served for no rollout and not recorded")
    return ", ".join(parts) + "."


def proxy_of(arguments: argparse.Namespace, models: Models, store: LightningStore, *, api_key: str | None) -> LLMProxy:
    """The proxy that the arguments describe."""
    settings = dict(models.settings)
    if arguments.retries is not None:  # the command line goes before the file
        settings["litellm_settings"] = {**(settings.get("litellm_settings") or {}), "num_retries": arguments.retries}
    return LLMProxy(
        port=arguments.port,
        model_list=models.entries,
        store=store,
        host=arguments.host,
        litellm_config=settings,
        num_retries=DEFAULT_RETRIES,
        api_key=api_key,
        access_host=arguments.access_host,
        rollout_budget=budget_of(arguments),
        run_budget=budget_of(arguments, "run_max"),
        deadline_seconds=arguments.deadline,
        replay=arguments.replay,
        raw_spans=arguments.raw_spans,
    )


async def _serve_until_signal(proxy: LLMProxy, store: str) -> signal.Signals:
    """Serve until Ctrl-C or SIGTERM, then finish what was begun; returns which of them it was."""
    with ending_signal() as received:
        proxy.start()
        names = ", ".join(dict.fromkeys(entry["model_name"] for entry in proxy.model_list))
        say("proxy", f"Serving {names} at {proxy.endpoint} (calls are recorded in {store}). Ctrl-C stops it.")
        try:
            return await received
        finally:
            await proxy.stop()
