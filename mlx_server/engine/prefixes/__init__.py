"""Cached prefixes beyond the scheduler: events for routers, and the tier on disk."""
