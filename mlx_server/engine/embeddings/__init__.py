"""Vectors and scores in place of text."""
