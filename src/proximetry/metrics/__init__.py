"""Retrieval, clustering and verification metrics: exact, in one pass, over arrays.

Names are imported on first use: `Metrics` needs neither torch nor numpy.
"""

# ruff: noqa: F403
from typing import TYPE_CHECKING

from proximetry._util.imports import lazy_exports
from proximetry.metrics.scores import Metrics

if TYPE_CHECKING:
    from proximetry.metrics.calibration import *
    from proximetry.metrics.calibration_fitting import *
    from proximetry.metrics.clustering import *
    from proximetry.metrics.embedding_map import *
    from proximetry.metrics.evaluation import *
    from proximetry.metrics.identification import *
    from proximetry.metrics.intervals import *
    from proximetry.metrics.proxy_separability import *
    from proximetry.metrics.reranking import *
    from proximetry.metrics.retrieval_result import *
    from proximetry.metrics.verification import *
    from proximetry.metrics.verification_pairs import *

_EXPORTS = {
    "calibration": "Calibration OperatingPoint",
    "calibration_fitting": "CalibrationResult Rate calibrate evaluate_calibration",
    "clustering": "KMeans PairwiseF1 ami cluster kmeans nmi pairwise_f1",
    "evaluation": "Evaluation evaluate score_result",
    "identification": "Identification identify",
    "intervals": "Interval",
    "verification_pairs": "DrawnPairs PairList Templates draw_pairs pair_similarities read_pairs "
    "templates verify_classes",
    "embedding_map": "map_embeddings",
    "reranking": "binary_codes expand_queries k_reciprocal_distances",
    "retrieval_result": "RetrievalResult retrieve",
    "proxy_separability": "Separability distinct_proxies separability",
    "verification": "ErrorVersusReject Roc Verification VerificationRates auc eer "
    "error_versus_reject roc tar_at_far verification_rates verify",
}

__all__ = ["Metrics", *(name for names in _EXPORTS.values() for name in names.split())]  # noqa: PLE0604

__getattr__ = lazy_exports(__name__, {module: names.split() for module, names in _EXPORTS.items()})
