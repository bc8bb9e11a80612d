"""
Settings: one typed tree, fed by flags, the environment, a YAML file and defaults, in that order of precedence.

``tree`` declares and documents the settings, ``options`` derives flags and variables from the tree, ``sources`` reads
them, and ``reload`` reads them again and finds what a running service can take over.
"""
