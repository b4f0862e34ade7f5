"""The planners of the papers, for profiles and for plain graphs: one file a paper."""
