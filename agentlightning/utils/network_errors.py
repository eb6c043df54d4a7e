"""Which address did not answer, for errors of SDKs that say no more than "Connection error."."""

from urllib.parse import urlsplit


def unanswered_address(error: BaseException) -> str:
    """The address of the request that got no response, as the end of a message; empty if it is not known, or said.

    Neither passwords nor queries are shown, which may hold keys.
    """
    if getattr(error, "response", None) is not None:
        return ""
    try:
        parts = urlsplit(str(error.request.url))  # type: ignore[attr-defined] # of httpx, openai, anthropic
    except (AttributeError, RuntimeError, ValueError):  # httpx raises if there is none
        return ""
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return "" if address in str(error) else f" ({address} did not answer)"
