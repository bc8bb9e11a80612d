"""The APIs: one module or package for each family of operations, with its types."""
