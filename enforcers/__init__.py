"""Plan -> the next run: one file per mechanism."""
