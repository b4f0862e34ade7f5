"""Peaks of real training runs on a GPU, recorded once and compared with estimates anywhere.

    python -m benchmarks.gpu record --out DIR       on the machine with the GPU: needs torch and nothing else
    python -m benchmarks.gpu compare DIR            on any machine with memopt

DIR gets one file, `runs.jsonl.gz`. Every configuration trains in a process of its own; recording again goes on where it ended.
"""
