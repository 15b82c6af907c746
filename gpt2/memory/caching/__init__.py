"""The rooms of the caching allocator: blocks and pools, segments, the driver below, what it counts and says."""
