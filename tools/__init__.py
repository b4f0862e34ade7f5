"""What keeps the house in order, for those who build it; no part of the package."""
