"""OpenAI's Responses API and Conversations."""
