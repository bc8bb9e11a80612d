"""Access control: API keys, rate limits, restricted APIs, CORS."""
