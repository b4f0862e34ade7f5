"""Threads beside this one that may run the script's own code: what they do to tensors is seen by none of memopt's modes."""

from __future__ import annotations

import functools
import inspect
import sysconfig
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

from memopt.version import IMPORT_ROOT

_OURS = [f"{IMPORT_ROOT}/{room}/" for room in ("memopt", "cli", "instrument", "profiler", "enforcers")]
_LIBRARIES = (*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), *_OURS)
_FOR_ANYBODY = ("/threading.py", "/concurrent/futures/thread.py", "/multiprocessing/pool.py")
"""Their threads run whatever they are given. By name: a script that uses none of them need not import them."""


def threads_of_the_script() -> list[threading.Thread]:
    """Those that run code of the script's, or may be given some; not a library's own (a loader's, a progress bar's), nor autograd's."""
    here = threading.current_thread()
    return [each for each in threading.enumerate() if each is not here and _runs_code_of_the_script(each)]


def is_ours(thread: threading.Thread) -> bool:
    """Does it run memopt's code, and nothing else?"""
    code = _code_of(getattr(thread, "_target", None) or type(thread).run)
    return code is not None and code.co_filename.startswith(tuple(_OURS))


def _runs_code_of_the_script(thread: threading.Thread) -> bool:
    if isinstance(thread, threading._DummyThread):  # C++ made it
        return False
    code = _code_of(getattr(thread, "_target", None) or type(thread).run)
    return (
        code is None or not code.co_filename.startswith(_LIBRARIES) or code.co_filename.endswith(_FOR_ANYBODY)
    )


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    return getattr(function, "__code__", None)
