"""The tests run on one thread, as their child processes do: several start at once on few cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
