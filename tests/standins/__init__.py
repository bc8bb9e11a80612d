"""Stand-ins for backends of older releases and for uncommon models, which the demo does not serve."""
