"""Tools: the port behind which they run, the registry, and what answers a call."""
