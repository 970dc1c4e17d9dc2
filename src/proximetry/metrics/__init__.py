"""Retrieval, clustering and verification metrics: exact, in one pass, over arrays.

What needs torch is imported at its first use: `Metrics` alone, as a recipe or the help of the
command line wants it, loads neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from proximetry.metrics.scores import Metrics

if TYPE_CHECKING:
    from proximetry.metrics.clustering import (
        KMeans,
        PairwiseF1,
        ami,
        cluster,
        kmeans,
        nmi,
        pairwise_f1,
    )
    from proximetry.metrics.evaluation import (
        Evaluation,
        Interval,
        evaluate,
        evaluate_queries,
        score_result,
    )
    from proximetry.metrics.identification import Identification, identify
    from proximetry.metrics.pair_lists import (
        PairList,
        Templates,
        pair_similarities,
        read_pairs,
        set_similarities,
        templates,
    )
    from proximetry.metrics.retrieval import RetrievalResult, retrieve
    from proximetry.metrics.separation import Separability, separability
    from proximetry.metrics.verification import (
        Roc,
        Verification,
        auc,
        eer,
        roc,
        tar_at_far,
        verify,
    )
else:
    _MODULES = (
        "clustering",
        "evaluation",
        "identification",
        "pair_lists",
        "retrieval",
        "separation",
        "verification",
    )

    def __getattr__(name: str) -> Any:
        if name in __all__:
            for module in _MODULES:
                found = getattr(import_module(f"{__name__}.{module}"), name, None)
                if found is not None:
                    return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__


__all__ = [
    "Evaluation",
    "Identification",
    "Interval",
    "KMeans",
    "Metrics",
    "PairList",
    "PairwiseF1",
    "RetrievalResult",
    "Roc",
    "Separability",
    "Templates",
    "Verification",
    "ami",
    "auc",
    "cluster",
    "eer",
    "evaluate",
    "evaluate_queries",
    "identify",
    "kmeans",
    "nmi",
    "pair_similarities",
    "pairwise_f1",
    "read_pairs",
    "retrieve",
    "roc",
    "score_result",
    "separability",
    "set_similarities",
    "tar_at_far",
    "templates",
    "verify",
]
