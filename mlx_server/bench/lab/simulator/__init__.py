"""The scheduler on recorded or made-up traffic, with a device whose costs are published figures."""
