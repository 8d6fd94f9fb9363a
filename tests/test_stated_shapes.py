"""The shapes that signatures state are checked in every test, in all of the library."""

import ast
import importlib
import inspect

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError
from stated_shapes import DTYPES, SIGNATURES, modules_that_state_shapes

from jaxpar.models.positions import rotate


def test_a_wrong_shape_is_found():
    x = jnp.ones((2, 5, 3, 8))
    positions = jnp.zeros((2, 5), int)
    rotate(x, positions, jnp.ones(4))
    with pytest.raises(TypeCheckError, match="positions_BS"):
        rotate(x, positions[:, 1:], jnp.ones(4))


def test_a_wrong_dtype_is_found():
    with pytest.raises(TypeCheckError, match="positions_BS"):
        rotate(jnp.ones((2, 5, 3, 8)), jnp.zeros((2, 5)), jnp.ones(4))


@pytest.mark.parametrize("name", modules_that_state_shapes())
def test_what_is_stated_can_be_read_and_is_checked(name: str):
    module = importlib.import_module(name)
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if _states(node):
            eval(ast.unparse(node), vars(module))
        elif isinstance(node, ast.FunctionDef) and any(map(_states, _signature(node))):
            own = [one for one in SIGNATURES if one.startswith(f"{name}.")]
            assert any(one.endswith(f".{node.name}") for one in own), node.name


def test_how_many_signatures_are_checked():
    for name in modules_that_state_shapes():
        importlib.import_module(name)
    of_modules = [one for one in SIGNATURES if "<locals>" not in one]
    assert len(of_modules) >= 127


def _signature(function: ast.FunctionDef) -> list[ast.AST]:
    hints = [one.annotation for one in ast.walk(function.args) if isinstance(one, ast.arg)]
    return [node for hint in (*hints, function.returns) if hint for node in ast.walk(hint)]


def _states(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and ast.unparse(node.value) in DTYPES
