"""Coding agents, unmodified, in front of the service: see CONTRIBUTING.md."""
