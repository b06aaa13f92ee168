"""Anthropic's Messages route: request bodies, answers and streams."""
