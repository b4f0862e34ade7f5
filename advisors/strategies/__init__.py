"""The planners of the papers, for profiles: one file a paper."""
