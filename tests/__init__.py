"""The tests; ``docs/explanation/architecture.md`` says what is in which folder."""
