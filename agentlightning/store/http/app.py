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
from agentlightning.utils.metrics import MetricsBackend, PrometheusMetricsBackend
from agentlightning.utils.server_launcher import UNOBSERVED

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

NOT_SUPPORTED = ("/v1/metrics", "/v1/logs", "/v1/development/profiles")
_NOT_MODIFIED, _NOT_FOUND, _NOT_IMPLEMENTED, _UNAVAILABLE = 304, 404, 501, 503


class StoreApp(fastapi.FastAPI):
    """The application of one server, with the service its routes share."""

    service: StoreService
    registry: "CollectorRegistry | None" = None
    """Where figures are kept for Prometheus; None without that package."""

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
    app = StoreApp(
        title="Agent Lightning store",
        version=agentlightning.__version__,
        docs_url=None,
        redoc_url=None,
        telemetry=UNOBSERVED,
    )
    trackers = [] if tracker is None else [tracker]
    if importlib.util.find_spec("prometheus_client") is not None:
        from prometheus_client import CollectorRegistry

        app.registry = CollectorRegistry()
        trackers.insert(0, PrometheusMetricsBackend(registry=app.registry))
    app.service = StoreService(
        store,
        token=token,
        allowed_origins=cors_allow_origins or (),
        trackers=trackers,
        max_request_bytes=max_request_bytes,
    )
    app.add_middleware(StoreRoutes, service=app.service)
    if cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
            allow_credentials="*" not in cors_allow_origins,  # those of named pages, not of every page
        )
    app.include_router(_router)
    return app


_router = fastapi.APIRouter()


@_router.get("/health", tags=["server"])
@_router.get("/v1/agl/health", tags=["server"])
async def health() -> dict[str, str]:
    """The server runs."""
    return {"status": "ok"}


@_router.get("/ready", tags=["server"], responses={_UNAVAILABLE: {"description": "The store cannot be used."}})
async def ready(request: fastapi.Request) -> Response:
    """The server runs, and its store can be read and written to."""
    is_ready = await request.app.service.is_ready()
    return JSONResponse({"status": "ready" if is_ready else "unavailable"}, 200 if is_ready else _UNAVAILABLE)


@_router.get("/metrics", tags=["server"], response_class=PlainTextResponse)
@_router.get("/v1/prometheus", response_class=PlainTextResponse, include_in_schema=False)
@_router.get("/v1/prometheus/", response_class=PlainTextResponse, include_in_schema=False)
async def metrics(request: fastapi.Request) -> Response:
    """Figures for Prometheus."""
    service: StoreService = request.app.service
    if request.app.registry is None:
        detail = "Metrics need the package prometheus_client; on the server, run `pip install prometheus-client`."
        return _failure(_NOT_IMPLEMENTED, "NotInstalled", detail)
    from prometheus_client import generate_latest

    counts = await service.counts()
    gauges: dict[str, object] = {
        "agl_server_live_connections": service.live_connections,
        "agl_server_waiting_calls": service.waiting_calls,
        "agl_store_up": int(counts is not None),
    }
    gauges |= {f"agl_store_{name}": value for name, value in (counts or {}).items() if isinstance(value, (int, float))}
    lines = [f"# TYPE {name} gauge\n{name} {value}\n" for name, value in gauges.items()]
    return PlainTextResponse(generate_latest(request.app.registry).decode() + "".join(lines))


async def _not_supported() -> Response:
    """Only traces are taken over OTLP."""
    detail = "This server takes traces over OTLP, no metrics, logs or profiles; send traces to /v1/traces."
    return _failure(_NOT_IMPLEMENTED, "NotSupported", detail)


for _path in NOT_SUPPORTED:
    _router.add_api_route(_path, _not_supported, methods=["POST"], tags=["server"], status_code=_NOT_IMPLEMENTED)


def _failure(status: int, error_type: str, detail: str) -> Response:
    return JSONResponse({"detail": detail, "error_type": error_type}, status)


# ---------------------------------------------------------------------- pages


@_router.get("/docs", include_in_schema=False)
async def docs() -> HTMLResponse:
    page = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")
    policy = (
        "default-src 'none'",
        f"script-src {_hashes_of('script', page)}",
        f"style-src {_hashes_of('style', page)}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
    return HTMLResponse(page, headers={"content-security-policy": "; ".join(policy)})


def _hashes_of(tag: str, page: str) -> str:
    """What lets a page run the scripts, or the styles, that stand in it, and no others."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


# Addresses of the dashboard are relative, so that a server behind another one's path works too.


@_router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def root() -> Response:
    return RedirectResponse(DASHBOARD_PATH.removeprefix("/"))


@_router.api_route(f"{DASHBOARD_PATH}/", methods=["GET", "HEAD"], include_in_schema=False)
async def below_dashboard() -> Response:
    return RedirectResponse(f"..{DASHBOARD_PATH}")


@_router.api_route(DASHBOARD_PATH, methods=["GET", "HEAD"], include_in_schema=False)
@_router.api_route(f"{DASHBOARD_PATH}/{{name}}", methods=["GET", "HEAD"], include_in_schema=False)
async def dashboard(request: fastapi.Request, name: str = "") -> Response:
    """The page, or one of its files."""
    asset = asset_at(name)
    if asset is None:
        return _failure(
            _NOT_FOUND, "UnknownRoute", f"The dashboard has no file '{name}'; the page is at {DASHBOARD_PATH}."
        )
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=_NOT_MODIFIED, headers=asset.headers)
    return Response(asset.body, headers=asset.headers)
