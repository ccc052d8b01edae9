"""One llama-server: requests, streams, retries, the slot gate, cache accounting."""
