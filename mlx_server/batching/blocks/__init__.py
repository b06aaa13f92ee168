"""Blocks: allocation, sharing, prefixes, and what of them is kept on disk."""
