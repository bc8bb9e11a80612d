"""
Where a template pays for its work: its syntax tree, before it is compiled, gets the calls that charge for it.

Paid are: each round of a loop and each call of a macro or block, by the size of its body; expressions that are not
calls (``~``, comparisons, slices, lists) by the size of what they are made of. Calls, filters, tests and operators are
paid where the environment carries them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import nodes

# The lexer makes no such names; a template that passes one as text, to `map`, only makes itself pay.
ROUND = "a round"
WEIGHED = "weighed"
SIZED = "sized"
JOINED = "joined"

# A body's nodes per step: reading a name is less than a step, and of an `if` only one branch is taken.
_NODES_PER_STEP = 2
_CHARACTERS_PER_NODE = 64
_SEPARATE = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)


def meter(tree: nodes.Template) -> None:
    """Change *tree* so that its work is charged."""
    bodies: list[tuple[Any, int]] = [(node, _steps(node.body)) for node in _separate(tree)]
    for loop in tree.find_all(nodes.For):
        if loop.test is not None:
            # Rounds that the test leaves out never come to the body.
            paid = _filter(nodes.Const(None, lineno=loop.lineno), ROUND, _steps([loop.test]))
            loop.test = nodes.And(nodes.Not(paid, lineno=loop.lineno), loop.test, lineno=loop.lineno)
    _change_children(tree)
    for node, steps in bodies:
        charge = _filter(nodes.Const(None, lineno=node.lineno), ROUND, steps)
        node.body.insert(0, nodes.ExprStmt(charge, lineno=node.lineno))
    if tree.environment is not None:
        tree.set_environment(tree.environment)


def _separate(tree: nodes.Template) -> list[Any]:
    return list(tree.find_all(_SEPARATE))


def _steps(body: Sequence[nodes.Node]) -> int:
    """Return what *body* costs, without the bodies in it that are paid on their own."""
    count = 0
    pending = list(body)
    while pending:
        node = pending.pop()
        count += 1
        if isinstance(node, nodes.TemplateData):
            count += len(node.data) // _CHARACTERS_PER_NODE
        pending.extend(node.iter_child_nodes(exclude=("body",) if isinstance(node, _SEPARATE) else None))
    return 2 + count // _NODES_PER_STEP


def _change_children(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _changed(value))
        elif isinstance(value, list):
            value[:] = [_changed(item) if isinstance(item, nodes.Node) else item for item in value]


def _changed(node: nodes.Node) -> nodes.Node:
    """Return what takes the place of *node*; what is in it is changed already."""
    _change_children(node)
    if isinstance(node, nodes.Concat):
        return _filter(nodes.List(node.nodes, lineno=node.lineno), JOINED)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        node.node = _filter(node.node, SIZED)
    elif isinstance(node, nodes.Compare):
        _pay_comparison(node)
    elif isinstance(node, nodes.List | nodes.Tuple | nodes.Dict) and getattr(node, "ctx", "load") == "load":
        # What a container holds is paid when it is made: hashing a tuple cannot be paid for later.
        return node if _is_constant(node) else _filter(node, WEIGHED)
    return node


def _pay_comparison(node: nodes.Compare) -> None:
    operands = [node.expr, *(operand.expr for operand in node.ops)]
    for place, operand in enumerate(node.ops):
        left, right = operands[place], operands[place + 1]
        contains = operand.op in ("in", "notin")
        if _is_constant(right) or (_is_constant(left) and not contains):
            # Whatever it is compared with, a constant ends the comparison.
            continue
        if _is_constant(left):
            operand.expr = _filter(right, SIZED)
            continue
        operand.expr = _filter(right, WEIGHED)
        if place == 0:
            node.expr = _filter(left, WEIGHED)


def _is_constant(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) or (
        isinstance(node, nodes.List | nodes.Tuple | nodes.Dict | nodes.Pair)
        and all(_is_constant(child) for child in node.iter_child_nodes())
    )


def _filter(node: nodes.Expr, name: str, steps: int | None = None) -> nodes.Filter:
    arguments = [] if steps is None else [nodes.Const(steps, lineno=node.lineno)]
    return nodes.Filter(node, name, arguments, [], None, None, lineno=node.lineno)
