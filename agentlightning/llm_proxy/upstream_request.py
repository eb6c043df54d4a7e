"""What goes to a backend for a call: the caller's request, changed where it must be.

It is made anew for each backend that is tried. A backend that refuses what the proxy added (token ids, usage of a
stream) is called again without, and remembered.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import orjson

from agentlightning.dialects import DIALECTS, Dialect, TranslatedDialect
from agentlightning.dialects.translation import Translation
from agentlightning.llm_proxy.attribution import Headers
from agentlightning.llm_proxy.backends import Backend, BackendRequest, BackendResponse, PreparedRequest
from agentlightning.llm_proxy.budgets import Prices, Reservation, is_about_limit, with_token_limit, with_whole_counts
from agentlightning.llm_proxy.recorder import CallRecord, Origin
from agentlightning.llm_proxy.replay import RecordedResponse

if TYPE_CHECKING:
    from agentlightning.llm_proxy.gateway import Gateway

logger = logging.getLogger(__name__)

_IS_ABOUT_EXTRAS: Final = re.compile(
    rb"return_token_ids|logprobs|stream_options|include_usage|unrecognized|unknown|unexpected|extra|not permitted",
    re.IGNORECASE,
)
_PASSED_HEADERS: Final = frozenset(name for dialect in DIALECTS.values() for name in dialect.passed_headers)


@dataclass(frozen=True)
class ServedModel:
    """Which model serves a call, and with which settings."""

    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Request fields that replace the caller's."""
    resources_id: str | None = None
    """The version of the resources that the call is pinned to."""


async def served_model(gateway: "Gateway", origin: Origin | None, requested: str) -> ServedModel:
    """What the resources give to an agent that names itself comes before the requested model."""
    if origin is None:
        return ServedModel(requested)
    llm = None if origin.agent is None else await gateway.attempts.llm_of(origin)
    served = ServedModel(requested) if llm is None else ServedModel(llm.model, llm.sampling_parameters)
    if not gateway.backends.is_versioned(served.name):
        return served
    facts = await gateway.attempts.facts(origin)
    return served if facts.rollout is None else replace(served, resources_id=facts.rollout.resources_id)


def upstream_headers(headers: Headers) -> dict[str, str]:
    """Those of the caller's headers that a backend is sent."""
    return {name.decode(): headers[name].decode("latin-1") for name in _PASSED_HEADERS if name in headers}


class UpstreamRequest:
    """One call on its way to a backend."""

    def __init__(
        self,
        gateway: "Gateway",
        dialect: Dialect,
        origin: Origin | None,
        requested: dict[str, Any],
        record: CallRecord,
        headers: Headers,
    ) -> None:
        self.dialect = dialect
        """The caller's."""
        self.requested = requested
        """The caller's request."""
        self.translation: Translation | None = None
        """None, where the backend speaks the caller's dialect."""
        self.backend_dialect: Dialect = dialect
        self.has_extras = False
        """Whether more is asked of the backend than the caller did."""
        self._gateway = gateway
        self._origin = origin
        self._record = record
        self._headers = headers
        self._model = ServedModel(str(requested["model"]))
        self._backend: Backend | None = None
        self._is_plain = False
        self._reservation: Reservation | None = None
        self._is_unlimited = False
        self._is_replay_tried = False

    async def resolve_model(self) -> None:
        self._model = await served_model(self._gateway, self._origin, self._model.name)

    async def send(self) -> BackendResponse | RecordedResponse:
        """The response, as it begins: of a backend or, where calls are replayed, from the record."""
        gateway, origin = self._gateway, self._origin
        if gateway.replays is not None and origin is not None and not self._is_replay_tried:
            self._is_replay_tried = True  # once, also where the backend is called a second time without extras
            recorded = await gateway.replays.find(gateway.attempts, origin, self.dialect, self.requested)
            if recorded is not None:
                self._use_replay(recorded)
                return recorded
        return await gateway.backends.send(
            BackendRequest(
                model=self._model.name,
                rollout_id=origin.rollout_id if origin is not None else "",
                prepare=self._prepare,
                resources_id=self._model.resources_id,
            )
        )

    def _use_replay(self, recorded: RecordedResponse) -> None:
        record = self._record
        self._speak(recorded.dialect)
        self.has_extras = True  # the record may hold what the caller did not ask for
        record.sent = b"" if recorded.sent == record.request else recorded.sent
        record.sent_json = orjson.loads(recorded.sent)
        record.provider, record.replayed_from = recorded.provider, recorded.span_id
        record.backend, record.version, record.backend_dialect = recorded.backend, recorded.version, recorded.dialect

    def _speak(self, dialect: Dialect) -> None:
        self.backend_dialect, self.translation = dialect, None
        if isinstance(dialect, TranslatedDialect) and isinstance(self.dialect, TranslatedDialect):
            self.translation = None if dialect is self.dialect else Translation(self.dialect, dialect)

    def _prepare(self, backend: Backend) -> PreparedRequest:
        """The request for one backend."""
        record, gateway, origin = self._record, self._gateway, self._origin
        self._backend = backend
        dialect = backend.serving(self.dialect)
        self._speak(dialect)
        request = self._overridden(backend, dialect)
        if self._model.overrides:
            request = {**request, **self._model.overrides}
        body = request if self.translation is None else self.translation.request(request)
        if backend.defaults:
            body = {**backend.defaults, **body}
        has_new_counts = False
        if gateway.budgets.is_limited:
            whole = with_whole_counts(dialect, body)
            has_new_counts = whole is not body
            body = self._within_budget(backend, dialect, whole)
        if body.get("model") != backend.model:
            body = {**body, "model": backend.model}
        body = self._with_extras(backend, dialect, body)
        # A count that was made whole equals the one that came, and backends may read that as another.
        sent = record.request if body == self.requested and not has_new_counts else orjson.dumps(body)
        record.sent_json, record.sent = body, b"" if sent is record.request else sent
        record.backend, record.provider, record.version = backend.name, backend.provider, backend.version
        record.backend_dialect = dialect
        headers = upstream_headers(self._headers)
        if backend.provider == "agl" and origin is not None:  # an engine of ours may need to know whose call it is
            headers["x-rollout-id"], headers["x-attempt-id"] = quote(origin.rollout_id), quote(origin.attempt_id)
        return PreparedRequest(dialect=dialect, body=sent, stream=record.is_stream, headers=headers)

    def _overridden(self, backend: Backend, dialect: Dialect) -> dict[str, object]:
        """The caller's request, but for fields that the backend's entry overrides for the rollout's resources."""
        overrides = backend.overrides.get(self._model.resources_id or "")
        if overrides is None or not dialect.limit_fields:
            return self.requested
        for name, value in overrides.items():
            reported = (backend.model_name, name)
            if self.requested.get(name) not in (None, value) and reported not in self._gateway.overridden_fields:
                self._gateway.overridden_fields.add(reported)
                logger.warning(
                    "Calls of model '%s' ask for %s=%.80r, which its entry of the model list overrides for their "
                    "resources '%s'; it is not heeded. Further ones are not told.",
                    *(backend.model_name, name, self.requested[name], self._model.resources_id),
                )
        removed = [name for name, value in overrides.items() if value is None]
        return {name: value for name, value in {**self.requested, **overrides}.items() if name not in removed}

    def _with_extras(self, backend: Backend, dialect: Dialect, body: dict[str, object]) -> dict[str, object]:
        """Ask for token ids, log-probabilities and the usage of a stream, where the backend may have them."""
        settings, record = self._gateway.settings, self._record
        self.has_extras = False
        record.token_ids = "not asked"
        if not dialect.carries_tokens or self._is_plain or backend.name in self._gateway.plain_backends:
            return body
        ids = settings.asks_for_ids and backend.gives_token_ids is not False
        logprobs = settings.asks_for_logprobs and backend.gives_logprobs is True
        extended = body
        if ids or logprobs:
            extended = dialect.with_tokens(body, ids=ids, logprobs=logprobs)
        asks_for_anything = settings.asks_for_ids or settings.asks_for_logprobs or self._gateway.budgets.is_limited
        if record.is_stream and asks_for_anything:
            extended = dialect.with_usage(extended)
        self.has_extras = extended != body
        return extended

    def retry_without_extras(self, status: int, answer: bytes) -> bool:
        """Whether to send the call again without what we added, because the backend did not take it."""
        if status not in (400, 422):
            return False
        reservation = self._reservation
        if reservation is not None and not self._is_unlimited and reservation.is_ours:
            # A backend with less room than our limit writes what fits if there is none.
            self._is_unlimited = reservation.most_written is not None and is_about_limit(answer)
            if self._is_unlimited:
                return True
        if not self.has_extras or self._is_plain:
            return False
        is_sure = self._backend is not None and self._backend.gives_token_ids is True
        self._is_plain = not is_sure or _IS_ABOUT_EXTRAS.search(answer) is not None
        return self._is_plain

    def redacted(self, body: bytes) -> bytes:
        """A backend's error without its secrets, should it repeat them."""
        return body if self._backend is None else self._backend.redacted_bytes(body)

    def redacted_text(self, text: str) -> str:
        return text if self._backend is None else self._backend.redacted(text)

    def redact(self, record: CallRecord) -> None:
        """Take the backend's secrets out of the record of a call that failed."""
        redacted = self.redacted(record.response)
        if redacted is not record.response:
            record.response, record.answer = redacted, None  # which is read again from what is left

    def confirm(self) -> None:
        """The call was answered; if that took a second, plain one, the backend gets only such from now on."""
        if self._is_plain and self._backend is not None and self._record.outcome == "answered":
            self._gateway.plain_backends.add(self._backend.name)

    def note_tokens(self, record: CallRecord) -> None:
        """Write on the record whether the token ids came."""
        if isinstance(record.answer, Mapping) and self.backend_dialect.has_token_ids(record.answer):
            record.token_ids = "given"
        elif self.backend_dialect.carries_tokens and isinstance(record.sent_json, Mapping):
            was_asked = record.sent_json.get("return_token_ids") or self._is_plain
            record.token_ids = "not given" if was_asked else "not asked"

    # ------------------------------------------------------------------ budgets

    def _within_budget(self, backend: Backend, dialect: Dialect, body: dict[str, object]) -> dict[str, object]:
        prices = Prices(backend.input_cost_per_token or 0.0, backend.output_cost_per_token or 0.0)
        if self._reservation is not None and self._reservation.prices != prices:
            self._reservation.cancel()
            self._reservation = None
        if self._reservation is None:
            rollout_id = None if self._origin is None else self._origin.rollout_id
            self._reservation = self._gateway.budgets.admit(rollout_id, dialect, body, prices)
        most = self._reservation.most_written
        return body if most is None or self._is_unlimited else with_token_limit(dialect, body, most, backend.provider)

    def charge_budget(self, record: CallRecord) -> None:
        """The call is over, however it ended."""
        if self._reservation is not None:
            is_begun = record.first_part_seconds is not None or (bool(record.response) and record.outcome != "failed")
            self._reservation.charge(record.usage, is_begun=is_begun)
            self._reservation = None
