"""The page: one HTML file, its data, its parts, and the lines of the script that it shows."""
