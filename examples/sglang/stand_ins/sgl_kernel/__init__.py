"""Stands in for `sgl_kernel`, the GPU kernels that SGLang imports on a CPU too.

Every name of the package and of the modules below it can be imported; what is called raises. The one thing that must be
missing is `sgl_kernel.scalar_type`: SGLang looks for it and has a substitute of its own.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

__version__ = "0.0.0"


def _missing(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):  # What Python itself asks a module for.
        raise AttributeError(name)

    def kernel(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in: there is no such kernel on this machine")

    return kernel


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        return _missing(name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}.") or fullname == f"{__name__}.scalar_type":
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> Callable[..., NoReturn]:
    return _missing(name)
