"""Where a forward is: the line of whoever wrote it, and the module that runs."""

from __future__ import annotations

import functools
import sys
import sysconfig
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import devicegraph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HERE: Final = f"{Path(devicegraph.__file__).parent}/"
#: Whose lines are nobody's model: torch's, this package's, and the standard library's between them.
_PASSED_OVER: Final = (f"{Path(torch.__file__).parent}/", _HERE, f"{sysconfig.get_path('stdlib')}/", "<frozen")
_PACKAGES: Final = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
#: What lies in there and is a model all the same, or somebody else's.
_MODELS: Final = (f"{_HERE}demo/", f"{_HERE}testing/", *_PACKAGES)


class Site(NamedTuple):
    """A place in a forward."""

    module: str
    file: str
    line: int


@functools.cache
def _is_passed_over(file: str) -> bool:
    if file.startswith(_PASSED_OVER[:2]):
        return not file.startswith(_MODELS[:2])
    return file.startswith(_PASSED_OVER) and not file.startswith(_MODELS)


class ModuleStack:
    """The modules whose forwards run, by their qualified names."""

    def __init__(self, on_module: Callable[[torch.nn.Module], None]) -> None:
        self._on_module = on_module
        #: Each module with its name, by identity.
        self.named: dict[int, tuple[torch.nn.Module, str]] = {}
        self._running: list[str] = []
        self._thread = threading.get_ident()

    def add_root(self, root: torch.nn.Module) -> None:
        """Names a module and those in it."""
        for name, module in root.named_modules():
            self.named.setdefault(id(module), (module, name or type(root).__name__))

    def name_of(self, module: torch.nn.Module) -> str:
        """A module's name; one that nobody named before is a root."""
        if id(module) not in self.named:
            self.add_root(module)
        return self.named[id(module)][1]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follows the modules of this thread for the block."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def here(self) -> Site:
        """Where this thread is: the innermost line that is a model's, and the innermost module."""
        frame = sys._getframe(1)
        while _is_passed_over(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        return Site(self._running[-1] if self._running else "", frame.f_code.co_filename, frame.f_lineno)

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running.append(self.name_of(module))
            self._on_module(module)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running.pop()

    def of_failure(self, error: BaseException) -> Site:
        """Where an error was raised: the innermost line that is a model's."""
        site = Site("", "", 0)
        traceback = error.__traceback__
        while traceback is not None:
            frame = traceback.tb_frame
            running = frame.f_locals.get("self")
            module = self.name_of(running) if isinstance(running, torch.nn.Module) else site.module
            is_passed_over = _is_passed_over(frame.f_code.co_filename)
            site = Site(module, *(site[1:] if is_passed_over else (frame.f_code.co_filename, traceback.tb_lineno)))
            traceback = traceback.tb_next
        return site if site.file else self.here()
