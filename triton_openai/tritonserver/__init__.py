"""A Triton server that this service starts, supervises and stops."""
