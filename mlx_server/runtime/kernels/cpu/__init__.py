"""The CPU backend: C++ that is compiled at first use, and what calls it."""
