"""What adapters share: the base class, the registry, decoders, and the parts of TensorRT-LLM's."""
