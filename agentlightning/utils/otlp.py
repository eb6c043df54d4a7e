"""Door to what reads and sends OTLP, which lives with the store's server and with what earlier scripts import."""

import pkgutil

_HOME_OF = {
    **dict.fromkeys(["JSON", "PROTOBUF", "encode_answer", "ingest_traces", "read_traces"], "store.http.otlp"),
    **dict.fromkeys(["LightningStoreOTLPExporter", "handle_otlp_export", "spans_from_proto"], "legacy.otlp"),
}
PROTOBUF_CT = "application/x-protobuf"


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pkgutil.resolve_name(f"agentlightning.{_HOME_OF[name]}:{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
