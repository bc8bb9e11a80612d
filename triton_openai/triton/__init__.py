"""The side of Triton: tensors, transports and discovery."""
