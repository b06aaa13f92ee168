"""The Metal and CUDA backend: kernel sources, how a step is cut for them, and the pool that they read and write."""
