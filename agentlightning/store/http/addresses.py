"""Who may be let in: a server that other machines reach must ask for a token."""

from agentlightning.errors import ConfigurationError
from agentlightning.utils.server_launcher import is_loopback

__all__ = ["refuse_open_address"]


def refuse_open_address(
    host: str,
    token: str | None,
    *,
    is_insecure: bool,
    option: str = "--host",
    at_risk: str = "read and change the store",
    given_as: str = "AGL_STORE_TOKEN or --token",
) -> None:
    """Refuse to serve other machines without a token.

    Args:
        is_insecure: The user has said that the network is theirs alone.
        option: What the user wrote the address as.
        at_risk: What everybody could do, in the form of "do this".
        given_as: Where the server looks for its token.
    """
    if token or is_insecure or is_loopback(host):
        return
    all_the_same = "--insecure" if option.startswith("--") else "insecure=True"
    raise ConfigurationError(
        f"{option} {host} lets other machines in, and without a token everybody who reaches it can {at_risk}; make one "
        f"with `agl tokens new` and give it as {given_as}, or say {all_the_same} if the network is yours alone."
    )
