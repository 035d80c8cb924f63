"""The networks, and rewrites of them that need less memory."""
