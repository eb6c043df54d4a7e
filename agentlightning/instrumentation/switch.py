"""Switch: one patch, turned on and off by plain functions, for scripts that do not use a tracer."""

import warnings

from agentlightning.instrumentation.patch import Patch

__all__ = ["Switch"]


class Switch:
    """Applies a patch once, however often it is turned on."""

    def __init__(self, patch: Patch) -> None:
        self.patch = patch
        self._is_on = False

    def turn_on(self) -> bool:
        """True if the library is there and is, or will be when it is imported, changed; warns the second time."""
        if self._is_on:
            warnings.warn(f"{self.patch.name} is instrumented already; nothing was changed.", stacklevel=3)
            return True
        if not self.patch.is_installed:
            warnings.warn(f"{self.patch.name} is not installed, so it is not instrumented.", stacklevel=3)
            return False
        self.patch.apply()
        self._is_on = True
        return True

    def turn_off(self) -> None:
        """Harmless if it is off."""
        self.patch.undo()
        self._is_on = False
