"""The web application around the store's routes: health, metrics, documentation, the dashboard."""

import base64
import hashlib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastapi
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response

import agentlightning
from agentlightning.dashboard import DASHBOARD_PATH, asset_at
from agentlightning.store.base import LightningStore
from agentlightning.store.http.openapi import describe
from agentlightning.store.http.rest import StoreRoutes
from agentlightning.store.http.service import DEFAULT_MAX_REQUEST_BYTES, StoreService
from agentlightning.utils.metrics import MetricsBackend, MultiMetricsBackend, PrometheusMetricsBackend
from agentlightning.utils.server_launcher import UNOBSERVED

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["StoreApp", "build_app"]

NOT_SUPPORTED = ("/v1/metrics", "/v1/logs", "/v1/development/profiles")
_NOT_MODIFIED = 304
_NOT_IMPLEMENTED = 501
_UNAVAILABLE = 503
_PREFIX = "agl_store_"


class StoreApp(fastapi.FastAPI):
    """The application of one server, with the service its routes share."""

    service: StoreService

    def begin_shutdown(self) -> None:
        """Called in the serving loop before connections are closed: what waits is told to ask again later."""
        self.service.close()

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = describe(super().openapi())
        return self.openapi_schema


def build_app(
    store: LightningStore,
    *,
    token: str | None = None,
    cors_allow_origins: Sequence[str] | None = None,
    tracker: MetricsBackend | None = None,
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES,
) -> StoreApp:
    """An application that serves a store."""
    registry = _new_registry()
    service = StoreService(
        store,
        token=token,
        allowed_origins=cors_allow_origins or (),
        tracker=_trackers(registry, tracker),
        max_request_bytes=max_request_bytes,
    )
    app = StoreApp(
        title="Agent Lightning store",
        version=agentlightning.__version__,
        docs_url=None,
        redoc_url=None,
        telemetry=UNOBSERVED,
    )
    app.service = service
    app.add_middleware(StoreRoutes, service=service)
    if cors_allow_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(cors_allow_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.include_router(_around(service, registry))
    app.include_router(_dashboard())
    return app


def _new_registry() -> "CollectorRegistry | None":
    if importlib.util.find_spec("prometheus_client") is None:
        return None
    from prometheus_client import CollectorRegistry

    return CollectorRegistry()


def _trackers(registry: "CollectorRegistry | None", tracker: MetricsBackend | None) -> MetricsBackend | None:
    if registry is None:
        return tracker
    own = PrometheusMetricsBackend(registry=registry)
    return own if tracker is None else MultiMetricsBackend([own, tracker])


def _around(service: StoreService, registry: "CollectorRegistry | None") -> fastapi.APIRouter:
    router = fastapi.APIRouter()

    @router.get("/health", tags=["server"])
    @router.get("/v1/agl/health", tags=["server"])
    async def health() -> dict[str, str]:
        """The server runs."""
        return {"status": "ok"}

    docs_page = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")
    docs_headers = {"content-security-policy": _policy_of(docs_page)}

    @router.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page, headers=docs_headers)

    @router.get("/ready", tags=["server"], responses={_UNAVAILABLE: {"description": "The store cannot be used."}})
    async def ready() -> Response:
        """The server runs, and its store can be read and written to."""
        is_ready = await service.is_ready()
        return JSONResponse({"status": "ready" if is_ready else "unavailable"}, 200 if is_ready else _UNAVAILABLE)

    @router.get("/metrics", tags=["server"], response_class=PlainTextResponse)
    @router.get("/v1/prometheus", tags=["server"], response_class=PlainTextResponse, include_in_schema=False)
    @router.get("/v1/prometheus/", tags=["server"], response_class=PlainTextResponse, include_in_schema=False)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        if registry is None:
            detail = "Metrics need the package prometheus_client; on the server, run `pip install prometheus-client`."
            return JSONResponse({"detail": detail, "error_type": "NotInstalled"}, _NOT_IMPLEMENTED)
        return PlainTextResponse(await _exposition(service, registry))

    for path in NOT_SUPPORTED:
        router.add_api_route(path, _not_supported, methods=["POST"], tags=["server"], status_code=_NOT_IMPLEMENTED)
    return router


def _policy_of(page: str) -> str:
    """A policy that lets a page run the script and the style that stand in it, and call its own server."""

    def hashes_of(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {hashes_of('script')}",
            f"style-src {hashes_of('style')}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    )


def _dashboard() -> fastapi.APIRouter:
    """The page and its files. Addresses are relative, so that a server behind another one's path works too."""
    router = fastapi.APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def root() -> Response:
        return RedirectResponse(DASHBOARD_PATH.removeprefix("/"))

    @router.api_route(f"{DASHBOARD_PATH}/", methods=["GET", "HEAD"])
    async def below() -> Response:
        return RedirectResponse(f"..{DASHBOARD_PATH}")

    @router.api_route(DASHBOARD_PATH, methods=["GET", "HEAD"])
    async def page(request: fastapi.Request) -> Response:
        return _asset_response(request, "")

    @router.api_route(f"{DASHBOARD_PATH}/{{name}}", methods=["GET", "HEAD"])
    async def file(request: fastapi.Request, name: str) -> Response:
        return _asset_response(request, name)

    return router


def _asset_response(request: fastapi.Request, name: str) -> Response:
    asset = asset_at(name)
    if asset is None:
        detail = f"The dashboard has no file '{name}'; the page is at {DASHBOARD_PATH}."
        return JSONResponse({"detail": detail, "error_type": "UnknownRoute"}, 404)
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=_NOT_MODIFIED, headers=asset.headers)
    return Response(asset.body, headers=asset.headers)


async def _not_supported() -> Response:
    """Only traces are taken over OTLP."""
    detail = "This server takes traces over OTLP, no metrics, logs or profiles; send traces to /v1/traces."
    return JSONResponse({"detail": detail, "error_type": "NotSupported"}, _NOT_IMPLEMENTED)


async def _exposition(service: StoreService, registry: "CollectorRegistry") -> str:
    """What was measured, and what the store holds right now."""
    from prometheus_client import generate_latest

    gauges: dict[str, float] = {
        "agl_server_live_connections": service.live_connections,
        "agl_server_waiting_calls": service.waiting_calls,
        f"{_PREFIX}up": 1,
    }
    counts = await service.counts()
    if counts is None:
        gauges[f"{_PREFIX}up"] = 0
    gauges |= {_PREFIX + name: value for name, value in (counts or {}).items() if isinstance(value, (int, float))}
    lines = [f"# TYPE {name} gauge\n{name} {value}\n" for name, value in gauges.items()]
    measured: str = generate_latest(registry).decode()
    return measured + "".join(lines)
