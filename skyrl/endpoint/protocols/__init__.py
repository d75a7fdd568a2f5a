"""Protocols of the endpoint: OpenAI's, Anthropic's, and SkyRL's `/generate`."""
