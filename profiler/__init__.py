"""A run of a script -> Trace."""
