"""The embedded default: a small model and its server, so that a newcomer has a conversation."""
