"""Write docs/reference/openapi.json: the description of every route of the store server.

Run after a change to the routes or to the store's contract; a test compares the file with what a server says.
"""

import json
from pathlib import Path

from agentlightning.store import InMemoryLightningStore
from agentlightning.store.http.app import build_app

TARGET = Path(__file__).parent.parent / "docs" / "reference" / "openapi.json"


def main() -> None:
    document = build_app(InMemoryLightningStore()).openapi()
    TARGET.write_text(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {TARGET}: {len(document['paths'])} paths")


if __name__ == "__main__":
    main()
