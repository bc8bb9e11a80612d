"""The description of the API, ``GET /openapi.json``: OpenAPI 3.1 of what is served, made from the types."""
