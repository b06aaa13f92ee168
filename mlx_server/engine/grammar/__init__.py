"""Structured output: what an answer must look like, compiled to a mask of allowed tokens."""
