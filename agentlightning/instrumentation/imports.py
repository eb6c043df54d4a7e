"""Callbacks for the import of a module, so that a library is changed when the program first uses it, and not loaded
for our sake: some take seconds to import, and some speak to the network meanwhile.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

Callback = Callable[[ModuleType], None]


def is_installed(package: str) -> bool:
    """Whether a package could be imported; it is not."""
    if package in sys.modules:
        return sys.modules[package] is not None
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # its parent is missing, or it has no spec
        return False


class ImportWatch(MetaPathFinder):
    """Calls back once for each watched module, after it was imported; at once, if it was before."""

    def __init__(self) -> None:
        self._changing = threading.RLock()  # protects the callbacks and our place in sys.meta_path
        self._callbacks: dict[str, list[Callback]] = {}
        self._looking = threading.local()

    def when_imported(self, module: str, callback: Callback) -> Callable[[], object]:
        """Returns what cancels it."""
        self._expect(module, callback)
        # Whoever began to import it before that cannot tell; who began after it can, and then nobody waits any more.
        if sys.modules.get(module) is not None and self._cancel(module, callback):
            imported = _imported(module)
            if imported is not None:
                callback(imported)
            else:
                self._expect(module, callback)
        return lambda: self._cancel(module, callback)

    def _expect(self, module: str, callback: Callback) -> None:
        with self._changing:
            self._callbacks.setdefault(module, []).append(callback)
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def _cancel(self, module: str, callback: Callback) -> bool:
        """Whether the callback was still to be called."""
        with self._changing:
            waiting = self._callbacks.get(module, [])
            is_waiting = callback in waiting
            if is_waiting:
                waiting.remove(callback)
            if not waiting:
                self._callbacks.pop(module, None)
            # While the interpreter ends, there is no meta_path any more.
            if not self._callbacks and self in (sys.meta_path or ()):
                sys.meta_path.remove(self)
        return is_waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """What the other finders find, with a loader that notifies us when it is done."""
        if fullname not in self._callbacks or getattr(self._looking, "name", None) == fullname:
            return None
        self._looking.name = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.name = None
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _NotifyingLoader(spec.loader, self._notify)
        return spec

    def _notify(self, module: ModuleType) -> None:
        if sys.modules.get(module.__name__) is not module:  # a copy that someone loads beside it
            return
        with self._changing:
            callbacks = self._callbacks.pop(module.__name__, [])
            if not self._callbacks and self in sys.meta_path:
                sys.meta_path.remove(self)
        for callback in callbacks:
            callback(module)


class _NotifyingLoader(Loader):
    """A module's own loader, which the module gets back once it is loaded."""

    def __init__(self, loader: Loader, notify: Callback) -> None:
        self._loader = loader
        self._notify = notify

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._notify(module)

    def __getattr__(self, name: str) -> object:
        if name == "_loader":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._loader, name)


def _imported(module: str) -> ModuleType | None:
    """A module that is being imported, when that is done; None if it fails, which is told to whoever imports it."""
    try:
        return importlib.import_module(module)
    except Exception:  # noqa: BLE001 # a module may raise anything
        return None
