"""A budget held while the script runs: without a plan, or beside one where an iteration is unlike the profiled one."""
