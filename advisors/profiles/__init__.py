"""Planning of profiles: what a strategy is given, the default planner's search, its bound, rounds, and plan files."""
