"""A reject option for classifiers of scikit-learn, in its interface."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demur.errors import BadInput, bad_input
from demur.metrics import threshold_at_tpr

NEED = "RejectingClassifier needs scikit-learn; install it with pip install 'demur[sklearn]'"
with bad_input(NEED, (ImportError,)):
    from sklearn.base import BaseEstimator, ClassifierMixin, clone
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import train_test_split
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data


def _has_decision_function(self: "RejectingClassifier") -> bool:
    inner = getattr(self, "estimator_", self.estimator)
    return inner is None or hasattr(inner, "decision_function")


class RejectingClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that says which of its predictions to accept.

    `predict` returns a label for every sample; `accepts` says which of them to use. The threshold
    on the largest class probability is chosen on samples that are held out of training.

    Args:
        estimator: A scikit-learn classifier with `predict_proba`, or None for logistic regression.
        tpr: Share of the correct predictions to accept, on held-out samples.
        held_out: Share of the samples of `fit` that only choose the threshold. `fit` raises
            BadInput unless it holds out one sample per class on average, and has two of each.
        random_state: Seed of the choice of held-out samples.

    Attributes:
        classes_: The labels, in the order of the columns of `predict_proba`.
        threshold_: Smallest accepted probability of the predicted class.

    Example:
        >>> import numpy as np
        >>> from demur import RejectingClassifier
        >>> X = np.r_[np.zeros((20, 2)), np.ones((20, 2))]
        >>> classifier = RejectingClassifier(tpr=0.9).fit(X, np.repeat(["no", "yes"], 20))
        >>> classifier.predict(X[:1]).tolist()
        ['no']
        >>> classifier.accepts(X).shape
        (40,)
    """

    def __init__(
        self,
        estimator: Any = None,
        tpr: float = 0.95,
        held_out: float = 0.2,
        random_state: int | None = 0,
    ) -> None:
        self.estimator, self.tpr = estimator, tpr
        self.held_out, self.random_state = held_out, random_state

    def fit(self, X: Any, y: Any) -> "RejectingClassifier":
        """Train the classifier on some of the samples and choose the threshold on the others."""
        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise BadInput("the labels are of one class; a classifier needs at least two")
        counts = np.unique(y, return_counts=True)[1]
        if len(y) * self.held_out < len(counts) or counts.min() < 2:
            raise BadInput(
                f"{len(y)} samples of {len(counts)} classes are too few to hold some out for the "
                f"threshold; give at least {math.ceil(len(counts) / self.held_out)} samples, and "
                "two of each class"
            )
        x_fit, x_cal, y_fit, y_cal = train_test_split(
            X, y, test_size=self.held_out, random_state=self.random_state, stratify=y
        )
        inner = LogisticRegression() if self.estimator is None else clone(self.estimator)
        self.estimator_ = inner.fit(x_fit, y_fit)
        probabilities = self.estimator_.predict_proba(x_cal)
        correct = self.estimator_.classes_[probabilities.argmax(1)] == y_cal
        # a classifier without a correct prediction has none to accept
        self.threshold_ = np.inf
        if correct.any():
            self.threshold_ = threshold_at_tpr(probabilities.max(1), correct, self.tpr)
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the probability of each class, N, C."""
        check_is_fitted(self)
        found: NDArray[np.float64] = self.estimator_.predict_proba(
            validate_data(self, X, reset=False)
        )
        return found

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of each sample, N, accepted or not."""
        probabilities = self.predict_proba(X)
        labels: NDArray[Any] = self.classes_[probabilities.argmax(1)]
        return labels

    @available_if(_has_decision_function)  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Return the decision function of the classifier."""
        check_is_fitted(self)
        found: NDArray[np.float64] = self.estimator_.decision_function(
            validate_data(self, X, reset=False)
        )
        return found

    def accepts(self, X: Any) -> NDArray[np.bool_]:
        """Return which predictions are accepted, N."""
        return np.asarray(self.predict_proba(X).max(1) >= self.threshold_)
