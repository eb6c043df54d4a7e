"""Who may be let in: a server that other machines reach must ask for a token."""

from agentlightning.errors import ConfigurationError
from agentlightning.utils.server_launcher import is_loopback

__all__ = ["refuse_open_address"]

STORE_AT_STAKE = "read and change the store"
STORE_TOKEN = "a token"
STORE_TOKEN_PLACES = "AGL_STORE_TOKEN or --token"


def refuse_open_address(
    host: str,
    token: str | None,
    *,
    is_insecure: bool,
    option: str = "--host",
    at_stake: str = "read and change the store",
    what: str = "a token",
    given_as: str = "AGL_STORE_TOKEN or --token",
    way_out: str = "insecure",
) -> None:
    pass
