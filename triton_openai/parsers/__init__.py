"""Text to content, reasoning and tool calls."""
