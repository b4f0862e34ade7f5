"""Where the default planner's search begins: checkpoints, the graph planner's schedules, what pays for the link, alike storages, programs."""
