"""The tests; ``docs/contributing/architecture.md`` says what is in which folder."""
