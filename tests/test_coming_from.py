"""Every setting that docs/coming_from.md names as ours exists, and takes the value that stands
beside it.
"""

import re
import tomllib
from pathlib import Path

from jaxpar.base.config import Config, override
from jaxpar.base.toml import flatten

PAGE = Path(__file__).parent.parent / "docs" / "coming_from.md"


def test_every_setting_of_ours_exists() -> None:
    known = flatten(Config())
    found = 0
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
        else:
            cells = []
        for setting in re.findall(r"`([^`]+)`", cells[1] if len(cells) > 1 else ""):
            key, equals, value = setting.partition(" = ")
            assert key in known, f"{setting}, beside {cells[0]}"
            if equals:
                override(Config(), {key: tomllib.loads(f"value = {value}")["value"]})
            found += 1
    assert found > 200
