"""The realtime API, as far as it transcribes: text from audio that is being spoken, over a WebSocket."""
