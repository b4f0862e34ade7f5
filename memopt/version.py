"""Which version this is, and where it is imported from. A leaf: the package's door (`memopt/__init__.py`) is imported by nobody inside."""

from pathlib import Path

VERSION = "0.1.0"

IMPORT_ROOT = str(Path(__file__).resolve().parent.parent)
"""What a child process needs on its `sys.path` to import the same memopt."""
