"""The Responses API: its bodies, its streams, and what is kept of responses."""
