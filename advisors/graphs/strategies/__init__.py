"""The planners of the papers, for plain graphs."""
