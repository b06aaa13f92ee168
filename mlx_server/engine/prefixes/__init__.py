"""What is told and kept of a model's cached prefixes: events for routers, the tier on disk."""
