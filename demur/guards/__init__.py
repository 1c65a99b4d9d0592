"""Guards: classifiers with a calibrated rule that accepts or rejects each prediction.

guard(model, x_cal, y_cal, tpr=0.95)      # any classifier
Guard.from_run("digits-pgdat-rr")         # a trained run
Guard.load("bundle")(["cat.png"])         # a folder that guard.save wrote
"""

from demur.guards.core import Guard, guard
from demur.guards.decision import GuardResult

__all__ = ["Guard", "GuardResult", "guard"]
