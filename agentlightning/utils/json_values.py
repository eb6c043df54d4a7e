"""Names for JSON of other programs and of users: objects whose fields nobody has checked."""

from collections.abc import Mapping
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
JsonMapping: TypeAlias = Mapping[str, Any]
"""As `JsonObject`, to be read alone."""
