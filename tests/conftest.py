"""The tests run on one thread, as their child processes do: several start at once on few cores."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported


def pytest_collection_finish() -> None:
    """What the tests import, a million objects, is left out where all objects are collected or searched."""
    gc.collect()
    gc.freeze()
