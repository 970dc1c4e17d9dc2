from dataclasses import dataclass


@dataclass(frozen=True)
class Metrics:
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    precision_at: tuple[int, ...] = ()
    ndcg_at: tuple[int, ...] = (2, 4, 8)
    map_at: tuple[int, ...] = ()
    at_r: bool = True
    mrr: bool = True
    clustering: bool = False

    def names(self) -> list[str]:
        return [
            *(f"recall@{k}" for k in self.recall_at),
            *(f"precision@{k}" for k in self.precision_at),
            *(("r_precision", "map@r") if self.at_r else ()),
            *(f"map@{k}" for k in self.map_at),
            *(("mrr",) if self.mrr else ()),
            *(f"ndcg@{k}" for k in self.ndcg_at),
        ]
