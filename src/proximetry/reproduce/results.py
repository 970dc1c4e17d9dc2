"""The runs of a table that are there, in its order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proximetry.reproduce.plan import run_id
from proximetry.reproduce.records import Record
from proximetry.reproduce.tables import Table


@dataclass(frozen=True)
class Results:
    """The runs of a table that are there, in its order.

    Attributes:
        full: the runs on all training classes, by row.
        selection: the runs that chose the number of epochs, by row.
    """

    table: Table
    full: dict[str, Sequence[Record]]
    selection: dict[str, Record]

    @classmethod
    def of(cls, table: Table, records: dict[str, Record]) -> "Results":
        """Sort records into rows, by seed."""
        known = sorted(records.values(), key=lambda record: record.seed)
        full: dict[str, Sequence[Record]] = {
            row.name: [r for r in known if r.row == row.name and r.kind == "full"]
            for row in table.rows
        }
        return cls(table, full, {r.row: r for r in known if r.kind == "selection"})

    @property
    def runs(self) -> list[Record]:
        """The full runs, row by row."""
        return [record for records in self.full.values() for record in records]

    @property
    def everything(self) -> list[Record]:
        """All runs."""
        return [*self.runs, *self.selection.values()]

    @property
    def seeds(self) -> list[int]:
        """All seeds of full runs."""
        return sorted({record.seed for record in self.runs})

    @property
    def notes(self) -> list[str]:
        """What the runs note about the data, each note once."""
        return list(dict.fromkeys(note for record in self.everything for note in record.notes))

    def missing(self, seeds: Iterable[int], selection: bool) -> list[str]:
        """Names of the runs that a complete table would also have."""
        there = {record.id for record in self.everything}
        wanted = sorted({*self.seeds, *seeds})
        names = [run_id(row.slug, seed, "full") for seed in wanted for row in self.table.rows]
        if selection or self.selection:
            names += [run_id(row.slug, 0, "selection") for row in self.table.rows]
        return [name for name in names if name not in there]
