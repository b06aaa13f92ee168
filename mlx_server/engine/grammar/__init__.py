"""Structured output: grammars that answers must match, compiled to masks of allowed tokens."""
