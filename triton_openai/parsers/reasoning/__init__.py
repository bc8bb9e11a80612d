"""Reasoning parsers, one module for each family of formats."""
