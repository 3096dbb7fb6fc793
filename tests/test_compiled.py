"""A step compiled for a GPU and a TPU that are not here must stay as light as in the committed table."""
from pathlib import Path

import pytest

from xland_minigrid.measure.tables.compiled import AIMED, environment_of, figures_of

pytestmark = pytest.mark.newest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "results" / "compiled.md"


def committed() -> dict[tuple[str, str], list[str]]:
    "The rows of the table of steps, by card and program."
    table = PAGE.read_text(encoding="utf-8").partition("## Step")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    return {(row[0], f"step: {row[1]}"): row for row in rows[2:]}


def test_the_page_has_the_aims():
    "Kernels, kilobytes per world and loops of a step on an H100, at most."
    for program, kernels, kilobytes in zip(AIMED, (12, 20, 30), (1.02, 2.5, 4)):
        row = committed()["h100", program]
        assert int(row[4]) <= kernels and float(row[5]) <= kilobytes and row[7] == "none", row


@pytest.mark.slow
@pytest.mark.parametrize("card", ["h100", "v5e"])
def test_a_step_has_not_become_heavier(card):
    try:
        environment_of(card)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    for found in figures_of(card, list(AIMED)):
        row = committed()[card, found.program]
        assert found.body.kernels <= int(row[4]), f"{row} launched {row[4]} kernels, now {found.body.kernels}"
        assert found.body.bytes / found.each / 1000 <= float(row[5]) + 0.006, f"{row} moved {row[5]} kB, now {found.body.bytes / found.each / 1000}"
        assert len(found.body.loops) <= (0 if row[7] == "none" else row[7].count("×"))
