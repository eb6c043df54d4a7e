"""How long it takes until a program has a proxy: a fresh interpreter imports it. Prints one JSON line."""

import json
import time

began = time.perf_counter()
import agentlightning as agl  # noqa: E402 # this is what is measured

assert agl.LLMProxy
print(json.dumps({"version": agl.__version__, "import_s": time.perf_counter() - began}))
