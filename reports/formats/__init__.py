"""Reports for other programs: Perfetto, memory_viz, Markdown, JSON."""
