"""What boxmaker costs, in units of what any program must pay: `python -m benchmarks`."""
