"""Door to what reads and answers OTLP requests, which lives with the store's server."""

import pkgutil

_NAMES = frozenset(["JSON", "PROTOBUF", "encode_answer", "ingest_traces", "read_traces"])


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pkgutil.resolve_name(f"agentlightning.store.http.otlp:{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
