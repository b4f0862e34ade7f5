"""The CUDA caching allocator, simulated: blocks, settings, and replays of recorded streams."""
