"""
The service in front of the real vLLM, compared with vLLM's own server on the same weights: ``make engine``.

It is no part of ``make test``: its environment takes 3.6 GB of disk and ten minutes to install, and 8 GB of memory to
run.
"""
