"""memopt: profile, estimate, advise and apply device-memory plans for unmodified PyTorch training scripts.

From Python, the names below; what they need (torch, pandas, plotly) is imported when they are used.

    memopt.load("run.profile.json.gz")      a profile or plan: .to_pandas(), .plot(), .report("page.html")
    with memopt.profile("run.profile.json.gz"): ...training steps...
    with memopt.enforce("plan.json"): ...training steps...
    memopt.estimate("train.py", "--batch-size", "32", device="rtx-4090")
    %load_ext memopt, then %%memopt over a cell that trains

In a source checkout the rooms (`cli/`, `profiler/`, ...) are this folder's siblings; in an installed copy
they lie inside it. The two lines that append to `__path__` make both import as `memopt.<room>`.
"""

from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

from memopt.version import VERSION as __version__

_here = _Path(__file__).parent
if not (_here / "cli").is_dir():
    __path__.append(str(_here.parent))

if _TYPE_CHECKING:
    from memopt.api import enforce as enforce
    from memopt.api import estimate as estimate
    from memopt.api import load as load
    from memopt.api import profile as profile

__all__ = ["__version__", "enforce", "estimate", "load", "profile"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from memopt import api

        return getattr(api, name)
    raise AttributeError(f"module 'memopt' has no attribute {name!r}")


def load_ipython_extension(shell: object) -> None:
    """What `%load_ext memopt` calls: adds the magic `%%memopt`."""
    from memopt.notebook import register

    register(shell)
