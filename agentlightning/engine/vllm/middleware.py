"""What stands before every route of a vLLM that we start; vLLM imports it by its name (`--middleware`).

vLLM asks for its key below /v1 alone. Its routes for new weights lie elsewhere, and one of them unpickles what it is
sent: without this, every account of the machine could run code as the one that trains.
"""

import os
import secrets
from typing import Any, Final

__all__ = ["KEY_VARIABLE", "KeyMiddleware"]

KEY_VARIABLE: Final = "VLLM_API_KEY"
_OPEN: Final = ("/health", "/ping")
"""Say no more than whether the server lives."""
_REFUSAL: Final = b'{"error": {"message": "The key is missing or wrong.", "type": "Unauthorized", "code": 401}}'


class KeyMiddleware:
    """Refuses what does not show the key; RuntimeError without one, so that no server is open by mistake."""

    def __init__(self, app: Any) -> None:
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(
                f"{KEY_VARIABLE} is not set; without a key, everybody could change this server's weights."
            )
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope["path"] in _OPEN or self._is_admitted(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_REFUSAL))]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})

    def _is_admitted(self, scope: Any) -> bool:
        shown = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(shown, self._expected)
