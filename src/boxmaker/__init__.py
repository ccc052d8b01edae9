"""boxmaker: a personal agent that lives beside its owner's own llama-server."""

__version__ = "0.1.0"
