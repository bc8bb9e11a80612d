"""Tool-call parsers, one module for each family of formats."""
