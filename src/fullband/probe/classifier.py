"""The probe: an L2-regularised linear classifier, tested on whole groups that it was not fitted to (App. F)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

FOLDS = 4
INVERSE_REGULARISATION = 1.0  # of standardised features; scikit-learn's C


@dataclass(frozen=True)
class Probed:
    """`right_N`: whether each example was classified rightly by the probe that had not seen its group. `fold_accuracy`: of each fold."""

    right_N: np.ndarray
    fold_accuracy: list[float]

    @property
    def accuracy(self) -> float:
        return float(self.right_N.mean())

    @property
    def stderr(self) -> float:
        """Standard error over folds."""
        return float(np.std(self.fold_accuracy, ddof=1) / np.sqrt(len(self.fold_accuracy)))

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval, as if examples were independent."""
        return wilson(int(self.right_N.sum()), len(self.right_N))


def fit(states_ND: np.ndarray, labels_N: np.ndarray, groups_N: np.ndarray, seed: int = 0) -> Probed:
    """Cross-validation in four folds. Raises ValueError for fewer groups than folds, and without scikit-learn."""
    LogisticRegression = _sklearn("linear_model").LogisticRegression
    StandardScaler = _sklearn("preprocessing").StandardScaler
    pipeline = _sklearn("pipeline").make_pipeline
    states_ND = states_ND.astype(np.float64)
    right_N = np.zeros(len(labels_N), dtype=bool)
    accuracies = []
    for training, held_out in folds(groups_N, seed):
        classifier = pipeline(StandardScaler(), LogisticRegression(C=INVERSE_REGULARISATION, max_iter=2000))
        classifier.fit(states_ND[training], labels_N[training])
        right_N[held_out] = classifier.predict(states_ND[held_out]) == labels_N[held_out]
        accuracies.append(float(right_N[held_out].mean()))
    return Probed(right_N, accuracies)


def folds(groups_N: np.ndarray, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """(indices to fit to, indices held out) of each fold; no group is in both. Raises ValueError for fewer groups than folds."""
    if len(np.unique(groups_N)) < FOLDS:
        raise ValueError(f"{FOLDS} folds of whole groups need at least {FOLDS} groups, not {len(np.unique(groups_N))}")
    splitter = _sklearn("model_selection").GroupKFold(n_splits=FOLDS, shuffle=True, random_state=seed)
    return list(splitter.split(groups_N, groups=groups_N))


def shuffled(labels_N: np.ndarray, groups_N: np.ndarray, seed: int = 0) -> np.ndarray:
    """Labels permuted within each group, so that folds stay balanced while no label belongs to its input."""
    random = np.random.Generator(np.random.Philox(seed))
    mixed_N = labels_N.copy()
    for group in np.unique(groups_N):
        members = np.flatnonzero(groups_N == group)
        mixed_N[members] = random.permutation(labels_N[members])
    return mixed_N


def wilson(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    from scipy.stats import binomtest

    interval = binomtest(right, count).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def _sklearn(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(f"sklearn.{module}")
    except ImportError:
        raise ValueError("probing needs the package scikit-learn: pip install 'fullband[probe]'") from None
