"""The load generator: streams of requests over HTTP, and what is measured of their answers."""
