"""`agl dashboard`: look at a store in the browser, be it a file or a running server's.

A file is opened as every process of a training opens it, so it can be looked at while a training writes to it. It is
served until Ctrl-C, to this machine alone and there to whoever has the address: a token that is made for this one
server stands in it.
"""

import argparse
import asyncio
import html
import os
import secrets
import signal
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from urllib.parse import urldefrag

from agentlightning.cli.command import (
    argument,
    cli_command,
    port_number,
)
from agentlightning.cli.stores import first_response, is_remote, open_store
from agentlightning.dashboard import DASHBOARD_PATH, address_with_token
from agentlightning.errors import IncompatibleStore
from agentlightning.store import LightningStoreServer
from agentlightning.store.http.reader_file import reader_access, runtime_folder
from agentlightning.store.http.tokens import Scope, sign_token
from agentlightning.utils.private_files import replaced_file
from agentlightning.utils.server_launcher import ending_signal

LOOPBACK = "127.0.0.1"
MASTER_TOKEN_BYTES = 32

SIGNPOST = """\
<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>Agent Lightning</title>
<a href="{address}">The dashboard</a>
"""


@cli_command(
    "dashboard",
    description="Look at a store in the browser: runs, rollouts with their conversations and tokens, prompts, workers.",
    examples="""\
examples:
  agl dashboard runs.db                      look at a file, also while a training writes to it
  agl dashboard runs.db --port 8080          at an address of your choice
  agl dashboard runs.db --allow-changes      cancel rollouts, and have them tried again
  agl dashboard http://trainer:4747          look at the store of a running server

A file is shown to whoever has the printed address, which holds a token; keep it to yourself.
The store of a training of yours on this machine needs no more; of another server that wants a token, the page asks
for it.
""",
    arguments=(
        argument("store", metavar="STORE", help="the store file, or the address of a server or a database"),
        argument("--port", type=port_number, default=0, help="port on which a file is served; a free one by default"),
        argument("--no-browser", action="store_true", help="only say where the page is"),
        argument(
            "--allow-changes", action="store_true", help="let people cancel, retry and requeue the rollouts of a file"
        ),
    ),
)
def main(arguments: argparse.Namespace) -> int | None:
    # A browser needs a window to open; one for the terminal would take ours.
    has_screen = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    opens_browser = not arguments.no_browser and sys.stdout.isatty() and has_screen
    if not is_remote(arguments.store):
        return asyncio.run(_serve(arguments, opens_browser))
    access = reader_access(arguments.store)
    page = asyncio.run(_page_of(access.address))
    url = page if access.token is None or "#" in page else address_with_token(page, access.token)
    _show(f"The dashboard: {url}")
    if opens_browser:
        webbrowser.open(url if url == page else _signpost(runtime_folder(), url))
    return None


async def _page_of(address: str) -> str:
    """Where the page of a server is, which must be there; the address may be the page's own, with a view or a token."""
    server, fragment = urldefrag(address)
    server = server.rstrip("/").removesuffix(DASHBOARD_PATH)
    url = server + DASHBOARD_PATH
    response = await first_response(server, DASHBOARD_PATH)
    if (response.status, response.media_type) != (200, "text/html"):
        raise IncompatibleStore(
            f"The server at '{server}' has no dashboard ({DASHBOARD_PATH} answers {response.status}); it is no store "
            "server, or an older one."
        )
    return f"{url}#{fragment}" if fragment else url


async def _serve(arguments: argparse.Namespace, opens_browser: bool) -> signal.Signals:
    """Serve a file, or a database, until Ctrl-C or SIGTERM; returns which of them it was.

    The server's master token stays here; the page gets the narrowest one that may read everything, unless the caller
    wants to change something.
    """
    address = arguments.store
    master = secrets.token_urlsafe(MASTER_TOKEN_BYTES)
    token = sign_token(master, Scope("admin" if arguments.allow_changes else "reader"), expires_at=None)
    with ending_signal() as received:
        store = open_store(address, must_exist=True)
        try:
            server = LightningStoreServer(store, LOOPBACK, arguments.port, launch_mode="asyncio", token=master)
            await server.start()
            try:
                url = address_with_token(server.endpoint + DASHBOARD_PATH, token)
                _show(f"The dashboard of {address}: {url}\nCtrl-C stops it.")
                with _browser_opened(url) if opens_browser else nullcontext():
                    return await received
            finally:
                await server.stop()
        finally:
            await store.close()


@contextmanager
def _browser_opened(url: str) -> Iterator[None]:
    """Open a browser at an address that is not for everybody.

    Every account of the machine may see the command line of a browser, so it is given a file that only we may read and
    that leads to the address.
    """
    with tempfile.TemporaryDirectory(prefix="agl-dashboard-") as folder:  # nobody else may look into it
        page = _signpost(Path(folder), url)
        # Beside our work, for some browsers are waited for.
        threading.Thread(target=webbrowser.open, args=(page,), daemon=True, name="agl-browser").start()
        yield


def _signpost(folder: Path, url: str) -> str:
    """The address of a page in a folder of our own that leads to an address with a token."""
    with replaced_file(folder / "dashboard.html") as file:
        file.write(SIGNPOST.format(address=html.escape(url)).encode())
    return (folder / "dashboard.html").as_uri()


def _show(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
