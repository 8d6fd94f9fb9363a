"""The combinations of a sweep, and its table; docs/launch.md has one that runs."""

import pytest

from jaxpar.base.errors import UserError
from jaxpar.cli.arguments import take_words
from jaxpar.launch.sweep import Trial, grid, results_table


def test_every_combination_in_the_order_of_the_words():
    words = ["tiny", "--over", "mesh.tensor=1,2", "model.masks=[a(1, 2)],[b]", "--run", "here"]
    over, rest = take_words("--over", words)
    assert rest == ["tiny", "--run", "here"]
    masks = ["model.masks=[a(1, 2)]", "model.masks=[b]"]
    assert grid(over) == [[f"mesh.tensor={size}", mask] for size in (1, 2) for mask in masks]


def test_every_over_is_read_with_and_without_its_equals_sign():
    assert take_words(
        "--over", ["--over", "a.b=1", "--over", "c.d=x,y", "--run", "r", "--over=e.f=1,2"]
    ) == (
        ["a.b=1", "c.d=x,y", "e.f=1,2"],
        ["--run", "r"],
    )


def test_a_list_of_two_words_is_one_value():
    assert grid(["model.masks=[window(8),causal],[bigbird(3, 1)]"]) == [
        ["model.masks=[window(8),causal]"],
        ["model.masks=[bigbird(3, 1)]"],
    ]


@pytest.mark.parametrize(
    "over",
    [[], ["mesh.tensor"], ["mesh.tensor="], ["tensor=1,2"]],
)
def test_settings_without_values_are_refused(over: list[str]):
    with pytest.raises(UserError, match=r"mesh.tensor=1,2,4"):
        grid(over)


def test_a_refused_combination_has_its_reason_in_the_table():
    table = results_table(
        [Trial("mesh.tensor=1", 2.0, 2.5, 1234.5, 0.1), Trial("mesh.tensor=3", error="too odd")]
    )
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["mesh.tensor"] == ["1", "3"]
    assert columns["loss"] == ["2.0000", ""] and columns["refused or failed"] == ["", "too odd"]


def test_a_value_with_spaces_is_one_cell():
    table = results_table(
        [Trial("model.masks=[a(1, 2)] mesh.tensor=2", 2.0), Trial("model.masks=[b] mesh.tensor=1")]
    )
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["model.masks"] == ["[a(1, 2)]", "[b]"] and columns["mesh.tensor"] == ["2", "1"]
