"""Published measurements: what is read from a file, and what of it is refused."""

from __future__ import annotations

import pytest
from bench.foresight.published import LLAMA, row_of, text_of

from jaxpar.base.errors import UserError
from jaxpar.base.toml import presets
from jaxpar.bench.foresight.rows import parse_rows, published_rows, read_rows


def test_the_package_has_its_rows_each_with_a_source_and_a_known_chip() -> None:
    rows = published_rows()
    chips = presets("jaxpar.meshes.chips")
    assert len(rows) >= 45
    for row in rows:
        assert row.words["source"]
        assert row.chip.lower() in chips


def test_numbers_words_and_settings_are_read() -> None:
    row = row_of(dcn="dcn_data_parallelism=2", memory_gib=1.5, software="a column of no use")
    assert row.numbers["layers"] == 32 and row.batch == 3 and row.measured == 3.4
    assert row.numbers["slices"] == 1 and row.words["model"] == "llama3.1-8b"
    assert row.keys["query_proj"] == "device" and row.keys["dcn_data_parallelism"] == "2"
    assert row.stated_memory == 3 * 2**29


@pytest.mark.parametrize(
    ("column", "cell", "said"),
    [
        ("layers", "many", "layers is 'many'"),
        ("layers", 2.5, "layers is '2.5'"),
        ("chips", 0, "chips is '0'"),
        ("chips", "nan", "chips is 'nan'"),
        ("measured_step_seconds", "", "measured_step_seconds is ''"),
        ("measured_step_seconds", -1, "measured_step_seconds is '-1'"),
        ("per_device_batch_size", "1e400", "per_device_batch_size is"),
        ("name", " ", "name is empty"),
    ],
)
def test_a_bad_cell_names_the_line_and_the_column(column: str, cell: object, said: str) -> None:
    with pytest.raises(UserError, match=r"FILE\.csv, line 2") as found:
        row_of(**{column: cell})
    assert said in str(found.value)


def test_a_file_that_is_none_a_missing_column_and_a_name_that_stands_twice_are_refused(
    tmp_path,
) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_rows(tmp_path / "none.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(UserError, match="has no rows"):
        read_rows(tmp_path / "empty.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="no text"):
        read_rows(tmp_path / "binary.csv")
    with pytest.raises(UserError, match="no column measured_step_seconds"):
        parse_rows(text_of({"name": "a", "chip": "v6e", "chips": 8}), "FILE.csv")
    with pytest.raises(UserError, match="stands twice"):
        parse_rows(text_of(LLAMA, LLAMA), "FILE.csv")
