"""The HTTP API: one module or package for each family of endpoints, with its types and its handlers."""
