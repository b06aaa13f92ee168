"""Ollama's routes. docs/ollama.md states the rules."""
