"""Trace, Timeline, Plan, outcome -> what a person or a program reads."""
