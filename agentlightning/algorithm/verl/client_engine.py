"""verl's `llm_client` as an engine: the tokens of a prompt go in, those that verl's servers sampled come out.

`EngineApp` reads the requests of agents and writes the answers; this module samples for it. It serves open sessions
alone: a session is a rollout that the agent loop waits for. A call of any other rollout, or of an attempt that a later
one has replaced, is refused, because verl's servers sleep between the steps and weights change.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

from agentlightning.asgi.request import ConnectionScope, Receive, Send
from agentlightning.engine.sampling import FinishReason, Generation, GenerationFuture, OnToken, Sampling
from agentlightning.errors import EngineError, InvalidRequest, NotAllowed
from agentlightning.utils.json_values import JsonMapping, JsonObject

logger = logging.getLogger(__name__)

_caller: ContextVar[tuple[str, str]] = ContextVar("agl_verl_caller", default=("", ""))
"""The rollout and the attempt whose call is being served."""


class LlmClient(Protocol):
    """What verl gives to an agent loop to sample with."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: JsonObject) -> Any:
        """A `TokenOutput`: token_ids, log_probs, stop_reason, extra_fields."""
        ...


@dataclass
class Session:
    """One rollout that may call the model."""

    sampling: JsonMapping
    """What its calls are sampled with, whatever the agent asks for."""
    attempt_id: str = ""
    """The attempt that called last."""
    replaced: set[str] = field(default_factory=set)
    """Attempts that called before it."""
    in_flight: set["asyncio.Task[None]"] = field(default_factory=set)


class Sessions:
    """The sessions that are open, by rollout. Lives in one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}

    def open(self, rollout_id: str, sampling: JsonMapping) -> None:
        self._open[rollout_id] = Session(sampling)

    async def close(self, rollout_ids: Sequence[str], timeout_seconds: float) -> None:
        """Refuse further calls, and wait for those that verl's servers still sample."""
        closed = [session for one in rollout_ids if (session := self._open.pop(one, None)) is not None]
        running = {task for session in closed for task in session.in_flight}
        if running:
            _, late = await asyncio.wait(running, timeout=timeout_seconds)
            if late:
                logger.warning("%d model calls of closed rollouts still run after %g s.", len(late), timeout_seconds)

    def admit(self, rollout_id: str, attempt_id: str) -> Session:
        """The session of a call; NotAllowed if it is closed, or a later attempt has called."""
        session = self._open.get(rollout_id)
        if session is None:
            name = f"Rollout '{rollout_id[:80]}' is over or unknown" if rollout_id else "This call names no rollout"
            raise NotAllowed(f"{name}; the model under training answers calls of rollouts that run.")
        if attempt_id in session.replaced:
            raise NotAllowed(f"Attempt '{attempt_id[:80]}' of rollout '{rollout_id[:80]}' is over; another one runs.")
        if session.attempt_id not in ("", attempt_id):
            session.replaced.add(session.attempt_id)
        session.attempt_id = attempt_id
        return session


class AttributedApp:
    """Notes whose call a request is, by the headers that the proxy sends, and passes it on."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: ConnectionScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            rollout_id, attempt_id = (headers.get(name, b"") for name in (b"x-rollout-id", b"x-attempt-id"))
            _caller.set((unquote(rollout_id.decode("latin-1")), unquote(attempt_id.decode("latin-1"))))
        await self._app(scope, receive, send)


@dataclass(eq=False)
class ClientEngine:
    """A `TokenEngine` over verl's client."""

    client: LlmClient
    sessions: Sessions
    _: KW_ONLY
    name: str
    end_ids: frozenset[int]
    max_length: int
    """Tokens of prompt and answer together."""
    max_new_tokens: int
    """Of an answer, where the agent does not ask for fewer."""
    version: int = 0
    _requests: int = 0
    _has_warned: bool = False

    def start_serving(self) -> None:
        """verl's servers run already."""

    def close(self) -> None:
        """They go on; verl ends them."""

    def statistics(self) -> JsonObject:
        return {"requests": self._requests, "version": self.version}

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, on_token: OnToken | None = None
    ) -> GenerationFuture:
        """Sample for the session whose request is being served."""
        rollout_id, attempt_id = _caller.get()
        session = self.sessions.admit(rollout_id, attempt_id)
        room = self.max_length - len(prompt_ids)
        if room < 1:
            raise InvalidRequest(
                f"The prompt has {len(prompt_ids)} tokens, and the model takes {self.max_length} with the answer; "
                "shorten it, or raise data.max_prompt_length."
            )
        parameters = self._parameters(session, sampling, min(sampling.max_new_tokens, self.max_new_tokens, room))
        future = GenerationFuture()
        work = self._generate(future, attempt_id, list(prompt_ids), parameters, on_token)
        task = asyncio.get_running_loop().create_task(work, name="agl-verl-generate")
        session.in_flight.add(task)
        task.add_done_callback(session.in_flight.discard)
        self._requests += 1
        return future

    def _parameters(self, session: Session, sampling: Sampling, limit: int) -> JsonObject:
        """A dictionary for this call alone: verl's servers take entries out of it."""
        if sampling.seed is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Agents ask for the seed %d, which would make all rollouts of a task the same; it is left away, and "
                "temperature, top_p and top_k are those of the configuration.",
                sampling.seed,
            )
        parameters = {**session.sampling, "max_tokens": limit, "logprobs": True}
        if sampling.stop_ids:
            parameters["stop_token_ids"] = sorted(sampling.stop_ids)
        if sampling.min_new_tokens:
            parameters["min_tokens"] = sampling.min_new_tokens
        return parameters

    async def _generate(
        self,
        future: GenerationFuture,
        attempt_id: str,
        prompt_ids: list[int],
        parameters: JsonObject,
        on_token: OnToken | None,
    ) -> None:
        limit = parameters["max_tokens"]
        stops = self.end_ids | set(parameters.get("stop_token_ids", ()))
        try:
            output = await self.client.generate(attempt_id, prompt_ids=prompt_ids, sampling_params=parameters)
            future.set_result(self._generation(output, len(prompt_ids), limit, stops, on_token))
        except asyncio.CancelledError:
            future.set_exception(EngineError("The agent loop ended before the answer was sampled."))
            raise
        except EngineError as error:
            future.set_exception(error)
        except Exception as error:  # noqa: BLE001 # the boundary to verl: whatever its servers raise, the caller gets it
            future.set_exception(EngineError(f"verl's servers could not sample: {type(error).__name__}: {error}"))

    def _generation(
        self, output: Any, prompt_tokens: int, limit: int, stops: frozenset[int], on_token: OnToken | None
    ) -> Generation:
        token_ids, logprobs = list(output.token_ids), output.log_probs
        if output.stop_reason == "aborted":  # by verl's servers
            raise EngineError("verl's servers broke the answer off; the call may be made again.")
        if not token_ids or logprobs is None or len(logprobs) != len(token_ids):
            count = "no" if logprobs is None else len(logprobs)
            raise EngineError(
                f"verl's servers gave {len(token_ids)} tokens with {count} log-probabilities; "
                "actor_rollout_ref.rollout.calculate_log_probs must be true."
            )
        reason: FinishReason = "stop" if token_ids[-1] in stops or len(token_ids) < limit else "length"
        if on_token is not None:
            for number, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True), 1):
                if on_token(token_id, logprob):  # a stop string: what follows was sampled in vain
                    token_ids, logprobs, reason = token_ids[:number], logprobs[:number], "stop"
                    break
        first, last = (output.extra_fields.get(name) for name in ("min_global_steps", "max_global_steps"))
        version = self.version if first is None else int(first)
        self.version = max(self.version, version if last is None else int(last))
        return Generation(
            token_ids=token_ids,
            logprobs=[float(one) for one in logprobs],
            finish_reason=reason,
            weights_version=version,
            prompt_tokens=prompt_tokens,
            last_weights_version=None if last is None else int(last),
        )
