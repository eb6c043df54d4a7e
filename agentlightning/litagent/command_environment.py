"""The environment variables of a program that is an agent.

The model endpoint stands where the SDKs of OpenAI and Anthropic look for it, the attempt where OpenTelemetry does, and
the rest in variables that begin with `AGL_`. Later entries win: what is inherited, what we derive, what the user adds,
and last our `AGL_` variables, which are the contract with the program.
"""

import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pydantic_core import PydanticSerializationError, to_json

from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import RolloutFailed
from agentlightning.litagent.litagent import current_claim
from agentlightning.semconv import LightningResourceAttributes
from agentlightning.store.base import LightningStore
from agentlightning.store.http.tokens import is_signed, sign_for_attempt
from agentlightning.types import LLM, AttemptedRollout, NamedResources, ProxyLLM, TaskInput
from agentlightning.utils.secret_names import is_secret_name

logger = logging.getLogger(__name__)

REWARD_FILE: Final = "AGL_REWARD_FILE"
SHORTEST_SECRET: Final = 6
"""Placeholders such as `EMPTY` are shorter, and would be blacked out in every other word."""
_STORE_TOKEN: Final = LightningEnvVar.AGL_STORE_TOKEN.value
_SDK_KEYS: Final = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
_RESOURCE: Final = "OTEL_RESOURCE_ATTRIBUTES"


def as_json(value: object, name: str) -> str:
    """A value as one JSON document; models, dataclasses and dates as pydantic writes them."""
    try:
        return to_json(value).decode()
    except (PydanticSerializationError, ValueError) as error:
        raise RolloutFailed(
            f"The {name} cannot be given to a program, because it does not fit JSON: {error}"
        ) from error


def attempt_variables(
    task: TaskInput, resources: NamedResources, rollout: AttemptedRollout, folder: Path
) -> dict[str, str]:
    """What the program is to do, for which attempt, and where its reward goes."""
    reward_file = folder / "reward"
    reward_file.touch()
    usable = {name: bound_to(resource, rollout) for name, resource in resources.items()}
    variables = {
        "AGL_ROLLOUT_ID": rollout.rollout_id,
        "AGL_ATTEMPT_ID": rollout.attempt.attempt_id,
        REWARD_FILE: str(reward_file),
    }
    for name, text in (("AGL_TASK", as_json(task, "task")), ("AGL_RESOURCES", as_json(usable, "resources"))):
        # Linux starts no program with a variable above 128 KiB.
        if len(text.encode()) <= 100_000:
            variables[name] = text
        else:
            (folder / name).write_text(text, encoding="utf-8")
            variables[f"{name}_FILE"] = str(folder / name)
    return variables


def bound_to(resource: object, rollout: AttemptedRollout) -> object:
    """A resource as a program can use it: a model behind the proxy has a URL that names the attempt."""
    return resource.with_attempted_rollout(rollout) if isinstance(resource, ProxyLLM) else resource


def model_variables(resources: NamedResources, rollout: AttemptedRollout, given: Mapping[str, str]) -> dict[str, str]:
    """The endpoint of the first model, where SDKs look for it; nothing if there is no model.

    Args:
        given: What the program has anyway; its keys are kept where the resource has none.
    """
    llm = bound_to(_first_model(resources), rollout)
    if not isinstance(llm, LLM):
        return {}
    url = llm.endpoint
    # For servers that want no key, because the SDKs want one.
    keys = {name: llm.api_key or given.get(name) or "unused" for name in _SDK_KEYS}
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        "OPENAI_MODEL": llm.model,
        "ANTHROPIC_BASE_URL": url.removesuffix("/").removesuffix("/v1"),
        "AGL_MODEL": llm.model,
        **keys,
    }


# ---------------------------------------------------------------------- OpenTelemetry


def telemetry_variables(
    rollout: AttemptedRollout, store: LightningStore | None, given: Mapping[str, str]
) -> dict[str, str]:
    """The attempt that owns the program's spans and, if the store takes OTLP, where they go.

    `TRACEPARENT` lets programs that know the convention put their spans below ours.
    """
    others = [
        entry
        for entry in given.get(_RESOURCE, "").split(",")
        if entry and not entry.strip().startswith("agentlightning.")
    ]
    ours = {
        LightningResourceAttributes.ROLLOUT_ID.value: rollout.rollout_id,
        LightningResourceAttributes.ATTEMPT_ID.value: rollout.attempt.attempt_id,
    }
    variables = {_RESOURCE: ",".join([*others, *(f"{name}={quote(value, safe='')}" for name, value in ours.items())])}
    if trace.get_current_span().get_span_context().is_valid:
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        variables |= {name.upper(): value for name, value in carrier.items()}
    if store is not None and store.capabilities.get("otlp_traces"):
        endpoint = store.otlp_traces_endpoint()
        variables |= {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        }
        if token := _token_of_attempt(rollout, endpoint):
            variables[_STORE_TOKEN] = token
            variables["OTEL_EXPORTER_OTLP_TRACES_HEADERS"] = f"Authorization=Bearer%20{quote(token, safe='')}"
    return variables


def _token_of_attempt(rollout: AttemptedRollout, endpoint: str) -> str | None:
    """A token that is good for this attempt alone: the claim's, or one that we can sign; None if there is neither."""
    claim = current_claim()
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    if claim is not None and claim.token and (claim.rollout.rollout_id, claim.rollout.attempt.attempt_id) == ids:
        return claim.token
    ours = resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN)
    if not ours:
        return None
    if is_signed(ours):  # it permits more than one attempt, and cannot be narrowed
        warn_once(
            f"{_STORE_TOKEN} is a signed token, which is not handed on, and none came with the attempt, so programs "
            f"get no token and may not send spans to {endpoint}: claim rollouts from the queue of a current server, "
            "or set the master token."
        )
        return None
    return sign_for_attempt(ours, *ids)


@functools.lru_cache(maxsize=64)
def warn_once(message: str) -> None:
    """Log a warning once, not once for each program or call."""
    logger.warning("%s", message)


# ---------------------------------------------------------------------- what is inherited, and what is secret


def inherited(resources: NamedResources, *, is_everything: bool) -> dict[str, str]:
    """This process's environment without our own secrets and the credentials withheld, or the search path alone."""
    if not is_everything:
        return {name: value for name, value in os.environ.items() if name == "PATH"}
    left_out = credentials_withheld(resources)
    return {name: value for name, value in os.environ.items() if name not in left_out and not _is_secret_of_ours(name)}


def credentials_withheld(resources: NamedResources) -> frozenset[str]:
    """The user's credentials that a program does not inherit: all, if the resources name its model, and none otherwise.

    A program without a model calls one with the user's keys, and so does one whose model has no key of its own; a proxy
    has the keys itself.
    """
    llm = _first_model(resources)
    if llm is None:
        return frozenset()
    kept = _SDK_KEYS if not llm.api_key and not isinstance(llm, ProxyLLM) else ()
    # Of these variables most lead to credentials, whatever their names end with.
    named = {name for name in os.environ if is_secret_name(name) or name.startswith("AWS_")}
    return frozenset(
        name
        for name in named.difference(kept, {"AWS_CA_BUNDLE", "AWS_REGION", "AWS_DEFAULT_REGION"})
        if not _is_secret_of_ours(name)
    )


def _is_secret_of_ours(name: str) -> bool:
    return name.startswith("AGL_") and is_secret_name(name)


def _first_model(resources: NamedResources) -> LLM | None:
    """The one that programs find where SDKs look for it."""
    return next((resource for resource in resources.values() if isinstance(resource, LLM)), None)


def secrets_of(resources: NamedResources, environment: Mapping[str, str]) -> tuple[str, ...]:
    """What must not be seen in spans: API keys of the resources, and variables whose names say that they are secret.

    Those of this process count too, for the command may quote what the program does not inherit.
    """
    keys = {resource.api_key or "" for resource in resources.values() if isinstance(resource, LLM)}
    variables = (*os.environ.items(), *environment.items())
    named = {value for name, value in variables if is_secret_name(name)}
    return tuple(sorted(secret for secret in keys | named if len(secret) >= SHORTEST_SECRET))
