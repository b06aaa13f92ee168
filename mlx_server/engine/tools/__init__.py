"""Tool calls: how models write them, how they are parsed and streamed, and how they are forced."""
