"""Callers: their keys, tiers and rights, and what is left of their quotas."""
