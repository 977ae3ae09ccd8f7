"""Stand-ins for two packages that SGLang imports but never runs on a CPU.

Triton (0.9 GB) only decorates GPU kernels there, and the torchvision wheel that fits a
CUDA torch cannot be imported beside a CPU one. `install()` makes both importable where
they are absent; calling into either still fails, with a message that says why.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_PACKAGES = ("triton", "torchvision")


class _Placeholder:
    """A function, namespace or constant of a stand-in: callable, subscriptable, decorating."""

    def __getattr__(self, name: str) -> Any:
        return _attribute(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # `@triton.jit` gets the function; `@triton.autotune(...)` gets options first.
        if len(args) == 1 and not kwargs and inspect.isfunction(args[0]):
            return _Kernel(args[0])
        return self

    def __getitem__(self, key: object) -> _Placeholder:
        return self

    def __or__(self, other: object) -> _Placeholder:
        return self

    __ror__ = __or__


class _PlaceholderType(type):
    """Makes a stand-in's classes usable in `isinstance`, as bases, and as enumerations."""

    def __getattr__(cls, name: str) -> Any:
        return _attribute(name)


def _attribute(name: str) -> Any:
    """By convention a capital letter means a class.

    `triton.runtime.driver` is how code asks for a GPU: its absence is the answer.
    """
    if name.startswith("__") or name == "driver":
        raise AttributeError(name)
    if name[0].isupper():
        return _PlaceholderType(name, (), {"__init__": lambda self, *args, **kwargs: None})
    return _Placeholder()


class _Kernel:
    """A decorated GPU kernel: it exists, and refuses to run."""

    def __init__(self, function: Any) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")

    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError(f"{self.__name__} is a Triton kernel; this SGLang runs on CPU")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self[None]


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _attribute(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        module.__version__ = "3.0.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> list[str]:
    """Makes the missing packages importable; returns the names that needed a stand-in.

    Must run before the first `import sglang` of every process.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return []
    # Both cache their answer; asked now, they go on seeing the packages as absent and
    # never take the paths that would call into a stand-in.
    from torch.utils._triton import has_triton_package
    from transformers.utils.import_utils import is_torchvision_available

    has_triton_package()
    is_torchvision_available()
    sys.meta_path.append(_Finder(missing))
    return missing
