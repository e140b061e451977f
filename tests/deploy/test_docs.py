"""What the guides tell users to type is what the programs take."""

import re
from pathlib import Path

import pytest

from common.config import ALL_CONFIGS
from common.option_values import options_of

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CHANGELOG.md", "docs/operations.md", "docs/architecture.md", "docs/api.md")
OTHERS = {"--config", "--profile"}  # the cluster file's, and Docker's


@pytest.mark.parametrize("page", PAGES)
def test_options_that_the_docs_name_exist(page: str) -> None:
    known = {option.flag for option in options_of(ALL_CONFIGS).values()} | OTHERS
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    named = set(re.findall(r"`(--[a-z][a-z0-9-]*)", (ROOT / page).read_text(encoding="utf-8")))
    assert named <= known, named - known


def test_variables_that_the_composition_reads_are_described_where_it_is_used() -> None:
    files = [ROOT / "compose.yaml", *sorted((ROOT / "deploy" / "compose").glob("*.yaml"))]
    read = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", "".join(path.read_text() for path in files)))
    guide = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert read, "the composition is parametrised"
    assert read <= set(re.findall(r"`([A-Z_]+)", guide))
