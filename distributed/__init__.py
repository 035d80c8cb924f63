"""Processes that train together: the process group, data parallelism, sharding, and what they send."""
