"""Short random ids.

The digits come from the operating system and nothing is kept between calls, so forked processes and threads never
repeat each other, and no seed of the application makes two runs collide. `os.urandom` is also the cheapest such source:
its bytes print as hex directly, while `secrets` and `random.SystemRandom` wrap the same call.
"""

import os
import socket

__all__ = ["generate_id", "rollout_id", "attempt_id", "resources_id", "run_id", "worker_id"]


def generate_id(length: int) -> str:
    """That many random lower-case hex digits."""
    return os.urandom((length + 1) // 2).hex()[:length]


def rollout_id() -> str:
    """`ro-` and 12 digits."""
    return "ro-" + generate_id(12)


def attempt_id() -> str:
    """`at-` and 8 digits: enough to tell the attempts of one rollout apart."""
    return "at-" + generate_id(8)


def resources_id() -> str:
    """`rs-` and 12 digits."""
    return "rs-" + generate_id(12)


def run_id() -> str:
    """`run-` and 12 digits."""
    return "run-" + generate_id(12)


def worker_id(name: str, token: str) -> str:
    """A worker's name, and behind it the machine, this process and a token: unlike that of any other worker."""
    return f"{name}@{socket.gethostname()}-{os.getpid()}-{token}"
