"""What no plan should have to fix, seen in one recorded iteration: one rule a function."""
