"""Retrieval, clustering and verification metrics: exact, in one pass, over arrays.

Names are imported when they are first used: `Metrics` needs neither torch nor numpy.
"""

from typing import TYPE_CHECKING

from proximetry._common import lazy_exports
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
    from proximetry.metrics.codes import binary_codes
    from proximetry.metrics.evaluation import (
        Evaluation,
        evaluate,
        evaluate_codes,
        evaluate_queries,
        score_result,
    )
    from proximetry.metrics.identification import Identification, identify
    from proximetry.metrics.intervals import Interval
    from proximetry.metrics.pair_lists import (
        DrawnPairs,
        PairList,
        Templates,
        draw_pairs,
        pair_similarities,
        read_pairs,
        set_similarities,
        templates,
        verify_classes,
    )
    from proximetry.metrics.projection import map_embeddings
    from proximetry.metrics.reranking import expand_queries, k_reciprocal_distances
    from proximetry.metrics.retrieval import RetrievalResult, retrieve
    from proximetry.metrics.separation import Separability, distinct_proxies, separability
    from proximetry.metrics.verification import (
        Roc,
        Verification,
        auc,
        eer,
        roc,
        tar_at_far,
        verify,
    )

__all__ = [
    "DrawnPairs",
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
    "binary_codes",
    "cluster",
    "distinct_proxies",
    "draw_pairs",
    "eer",
    "evaluate",
    "evaluate_codes",
    "evaluate_queries",
    "expand_queries",
    "identify",
    "k_reciprocal_distances",
    "kmeans",
    "map_embeddings",
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
    "verify_classes",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "clustering": ("KMeans", "PairwiseF1", "ami", "cluster", "kmeans", "nmi", "pairwise_f1"),
        "codes": ("binary_codes",),
        "evaluation": (
            "Evaluation",
            "evaluate",
            "evaluate_codes",
            "evaluate_queries",
            "score_result",
        ),
        "identification": ("Identification", "identify"),
        "intervals": ("Interval",),
        "pair_lists": (
            "DrawnPairs",
            "PairList",
            "Templates",
            "draw_pairs",
            "pair_similarities",
            "read_pairs",
            "set_similarities",
            "templates",
            "verify_classes",
        ),
        "projection": ("map_embeddings",),
        "reranking": ("expand_queries", "k_reciprocal_distances"),
        "retrieval": ("RetrievalResult", "retrieve"),
        "separation": ("Separability", "distinct_proxies", "separability"),
        "verification": ("Roc", "Verification", "auc", "eer", "roc", "tar_at_far", "verify"),
    },
)
