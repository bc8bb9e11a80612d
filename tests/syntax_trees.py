"""Reads the syntax trees of Python's files, which several tests look at, faster than `ast.walk`."""

from __future__ import annotations

import ast


def nodes(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes of *tree*, the outer ones first, but for those that say whether a name is read or written."""
    found = [tree]
    for node in found:
        for value in vars(node).values():
            if isinstance(value, list):
                found.extend(part for part in value if isinstance(part, ast.AST))
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                found.append(value)
    return found
