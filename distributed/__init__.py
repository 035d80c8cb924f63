"""The process group, data parallelism, sharding, and what is sent."""
