"""One entry of a model list, read field by field, so that a mistake is told with the entry and the accepted form."""

import math
import os
from collections.abc import Mapping
from typing import Any, Final

from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy.backends.library_request import CHAT_FIELDS, EMBEDDINGS_FIELDS

__all__ = ["Entry"]

ENVIRONMENT_PREFIX: Final = "os.environ/"
_FORM: Final = '{"model_name": "name", "litellm_params": {"model": "provider/model", "api_base": "http://..."}}'
_SETTINGS: Final = frozenset(
    {
        *("model", "api_base", "base_url", "api_key", "api_version", "custom_llm_provider", "organization"),
        *("weight", "rpm", "tpm", "max_parallel_requests", "timeout", "request_timeout", "stream_timeout"),
        *("extra_headers", "default_headers", "headers", "extra_body", "input_cost_per_token", "output_cost_per_token"),
        *("input_cost_per_second", "output_cost_per_second", "version", "resources_id", "model_info", "litellm_params"),
        *("max_retries", "num_retries", "cooldown_time", "tags", "order", "drop_params", "additional_drop_params"),
        *("allowed_openai_params", "max_budget", "budget_duration", "use_in_pass_through", "use_litellm_proxy"),
        *("litellm_credential_name", "configurable_clientside_auth_params", "merge_reasoning_content_in_choices"),
        *("azure_ad_token", "tenant_id", "client_id", "client_secret", "region_name", "ssl_verify", "mock_response"),
    }
)
"""What LiteLLM reads itself; the rest of `litellm_params` are fields of the request."""
_LIBRARY_SETTINGS: Final = frozenset(
    {"api_version", "organization", "region_name", "drop_params", "additional_drop_params", "allowed_openai_params"}
    | {"azure_ad_token", "tenant_id", "client_id", "client_secret", "ssl_verify", "mock_response"}
)
"""Those of the settings that the litellm library wants as arguments of a call."""
_LIBRARY_REQUEST_FIELDS: Final = CHAT_FIELDS | EMBEDDINGS_FIELDS
"""What may be seen in a request to the library; anything else may be a credential."""


class Entry:
    """The fields of one entry, with their accepted forms."""

    def __init__(self, entry: Mapping[str, Any], number: int) -> None:
        self.place = f"Entry {number} of the model list"
        if not isinstance(entry, Mapping):
            raise self.wrong("the entry", type(entry).__name__, _FORM)
        model_name = entry.get("model_name")
        if not isinstance(model_name, str) or not model_name:
            raise self.wrong("model_name", model_name, _FORM)
        if model_name.count("*") > 1:
            raise self.wrong("model_name", model_name, "a name with one '*' at most, such as 'openai/*'")
        self.model_name = model_name
        self.place = f"Entry {number} of the model list ('{model_name}')"
        params = entry.get("litellm_params")
        if not isinstance(params, Mapping):
            raise self.wrong("litellm_params", type(params).__name__, _FORM)
        info = entry.get("model_info") or {}
        if not isinstance(info, Mapping):
            raise self.wrong("model_info", type(info).__name__, "a mapping, or nothing")
        self.info: Mapping[str, Any] = info
        self._entry = entry
        self._params = {name: self._resolved(name, value) for name, value in params.items()}
        if "api_base" not in self._params and "base_url" in self._params:
            self._params["api_base"] = self._params["base_url"]
        model = self.text("model")
        if model is None:
            raise self.wrong("litellm_params.model", params.get("model"), _FORM)
        self.model = model

    def wrong(self, field: str, value: object, accepted: str) -> ConfigurationError:
        """What to raise for a field that cannot be read."""
        return ConfigurationError(f"{self.place}: {field} is {value!r}; accepted is {accepted}.")

    def text(self, name: str) -> str | None:
        """A text of `litellm_params`; None if it is missing or empty."""
        value = self._params.get(name)
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            raise self.wrong(f"litellm_params.{name}", type(value).__name__, "a text")
        return value

    def label(self, name: str) -> str | None:
        """A name that may stand in the entry or in `model_info`."""
        value = self._entry.get(name, self.info.get(name))
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise self.wrong(name, value, "a text or a whole number")
        return str(value)

    def number(self, name: str, *, at_least: float, above: bool = False) -> float | None:
        """A number, wherever in the entry it stands."""
        value = self._anywhere(name)
        if value is None:
            return None
        accepted = f"a number {'above' if above else 'not below'} {at_least:g}"
        if isinstance(value, bool):
            raise self.wrong(name, value, accepted)
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise self.wrong(name, value, accepted) from None
        if not math.isfinite(number) or number < at_least or (above and number == at_least):
            raise self.wrong(name, value, accepted)
        return number

    def whole(self, name: str) -> int | None:
        """A limit: a whole number from 1."""
        number = self.number(name, at_least=1.0)
        if number is not None and number != int(number):
            raise self.wrong(name, number, "a whole number from 1")
        return None if number is None else int(number)

    def yes_or_no(self, name: str, fallback: bool | None) -> bool | None:
        """What `model_info` says about the backend."""
        value = self.info.get(name, fallback)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(f"model_info.{name}", value, "true, false or null")
        return value

    def health_path(self) -> str | None:
        """Where the backend is asked for its health."""
        path = self.info.get("health_path", "/models")
        if path is None:
            return None
        if not isinstance(path, str) or not path.startswith(("/", "http://", "https://")):
            raise self.wrong("model_info.health_path", path, "a path such as '/models', a URL, or null")
        return path

    def headers(self) -> dict[str, str]:
        """Headers the entry asks for."""
        headers: dict[str, str] = {}
        for name in ("default_headers", "headers", "extra_headers"):
            given = self._params.get(name) or {}
            if not isinstance(given, Mapping):
                raise self.wrong(f"litellm_params.{name}", type(given).__name__, "a mapping of texts")
            headers |= {str(key): str(self._resolved(name, value)) for key, value in given.items()}
        if any(character in text for pair in headers.items() for text in pair for character in "\r\n\0"):
            raise self.wrong("litellm_params.extra_headers", "...", "texts of one line")
        return headers

    def overrides(self) -> dict[str, dict[str, Any]]:
        """Request fields that are written over those of callers, by the id of their resources."""
        given = self.info.get("overrides") or {}
        fields = list(given.values()) if isinstance(given, Mapping) else [given]
        if not all(isinstance(one, Mapping) and all(isinstance(name, str) for name in one) for one in fields):
            accepted = "request fields by the id of resources, such as {'rs-1': {'temperature': 1.0, 'seed': None}}"
            raise self.wrong("model_info.overrides", given, accepted)
        return {str(resources_id): dict(one) for resources_id, one in given.items()}

    def rest(self, *, for_library: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is left of `litellm_params`: defaults of the request, and arguments for the litellm library."""
        body = self._params.get("extra_body") or {}
        if not isinstance(body, Mapping):
            raise self.wrong("litellm_params.extra_body", type(body).__name__, "a mapping of request fields")
        left = {name: value for name, value in self._params.items() if name not in _SETTINGS and value is not None}
        if not for_library:
            return {**left, **body}, {}
        defaults = {name: value for name, value in left.items() if name in _LIBRARY_REQUEST_FIELDS}
        options = {name: value for name, value in left.items() if name not in _LIBRARY_REQUEST_FIELDS}
        options |= {name: value for name, value in self._params.items() if name in _LIBRARY_SETTINGS}
        return {**defaults, **body}, options

    def _anywhere(self, name: str) -> Any:
        for place in (self._params, self._entry, self.info):
            if place.get(name) is not None:
                return place[name]
        return None

    def _resolved(self, name: object, value: Any) -> Any:
        """The value, taken from the environment where it says so."""
        if not isinstance(value, str) or not value.startswith(ENVIRONMENT_PREFIX):
            return value
        variable = value.removeprefix(ENVIRONMENT_PREFIX)
        found = os.environ.get(variable)
        if found is None:
            raise ConfigurationError(
                f"{self.place}: litellm_params.{name} is '{value}', but {variable} is not set in the environment."
            )
        return found
