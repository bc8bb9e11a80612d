"""Several real Tritons behind one service."""
