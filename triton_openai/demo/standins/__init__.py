"""
Stand-ins for the models of the real backends, run by Triton's Python backend.

Triton loads a copy of these files beside the model repository, in interpreters without this package. So they import
only one another (relatively), NumPy, ``tokenizers`` and Triton's own module.
"""
