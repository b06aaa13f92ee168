"""OpenAI's routes: request bodies, answers and streams."""
