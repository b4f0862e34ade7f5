"""Planning of graphs in the exchange form (docs/formats.md), by the strategies of the papers and by `auto`."""
