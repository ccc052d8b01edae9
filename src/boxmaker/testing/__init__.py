"""Fakes that ship: a scripted llama-server, a scripted port, a channel in the same Trio loop."""
