"""What no plan of a graph can undercut: bounds by moments and by linear programs."""
