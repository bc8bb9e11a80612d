"""Several processes that serve together: the parent's side (``pool``, ``process``), and what is said between them."""
