"""The user's script: run as `python` would, its threads, forks, signals, imports and profiler."""
