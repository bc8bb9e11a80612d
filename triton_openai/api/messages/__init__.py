"""Anthropic's Messages API, over the same turns as chats."""
