"""Fuzzing of the pure decoders: `make fuzz` for a while, `make test` over the saved inputs."""
