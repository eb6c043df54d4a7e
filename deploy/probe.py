"""Ask a server whether it is ready: `python probe.py URL TOKEN_FILE`; ends with 1 unless it answers 200.

Servers answer nobody without a token, probes included, and a probe's own words would show one.
"""

import sys
import urllib.request
from pathlib import Path

TIMEOUT_SECONDS = 5

url, token_file = sys.argv[1:]
headers = {"Authorization": f"Bearer {Path(token_file).read_text().strip()}"}
with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS):
    pass
