"""The companion model: vLLM's own library inside Triton's Python backend, and the repository that holds it."""
