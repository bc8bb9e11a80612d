"""The HTTP server: connections, admission, workers."""
