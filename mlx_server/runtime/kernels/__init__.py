"""Attention over paged blocks, and rows of state: one folder for each kind of device."""
