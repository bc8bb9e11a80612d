"""One answer being made: the generation run, its stages, several choices, time limits."""
