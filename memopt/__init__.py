"""memopt: profile, estimate, advise and apply device-memory plans for unmodified PyTorch training scripts.

In a source checkout the rooms (`cli/`, `profiler/`, ...) are this folder's siblings; in an installed copy
they lie inside it. The two lines at the end make both import as `memopt.<room>`.
"""

from pathlib import Path as _Path

__version__ = "0.1.0"

_here = _Path(__file__).parent
if not (_here / "cli").is_dir():
    __path__.append(str(_here.parent))
