"""Memory that no tensor shows: library workspaces, the CUDA context, and what `memopt calibrate` measured of them."""
