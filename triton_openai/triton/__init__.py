"""The side of Triton: tensors, transports, discovery, and the relay of Triton's own protocol."""
