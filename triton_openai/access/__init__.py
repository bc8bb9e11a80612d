"""Who may ask, and how much: API keys, limits, restricted APIs, CORS."""
