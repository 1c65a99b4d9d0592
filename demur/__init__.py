"""Adversarially robust image classifiers that may reject an input.

    from demur import PGD, Linf, RCon, Run

Each public name is imported from its module on first use, so `import demur` loads no library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from demur.attacks import (
        APGD,
        CE,
        CW,
        DLR,
        FAB,
        KL,
        PGD,
        AcceptedError,
        Attack,
        Clean,
        FalseRejection,
        ForceRejectionEnsemble,
        HopSkipJump,
        MinMargin,
        Misclassified,
        MultiTarget,
        Objective,
        PlusLogScore,
        RayS,
        Rejected,
        Square,
        UntargetedMargin,
        WorstScore,
    )
    from demur.attacks.balls import L1, L2, Linf
    from demur.attacks.wrappers import ModelWithScore, RejectClassModel
    from demur.audits import AuditReport, AutoAttack, EnsembleResult, RejectAutoAttack, audit
    from demur.audits.model_loading import load_model
    from demur.calibrate import TPR, Coverage, Risk, Uncertified, certify_threshold
    from demur.data import CIFAR10, CIFAR100, Digits, OwnImages
    from demur.engine import attack
    from demur.errors import BadInput
    from demur.evaluate import (
        LoadedRun,
        RecordOptions,
        RejectorEvaluation,
        compare,
        resolve_thresholds,
        run_attack,
    )
    from demur.guards import Guard, GuardResult, guard
    from demur.methods import (
        ATRO,
        CARL,
        CCAT,
        EBD,
        PGDAT,
        RR,
        TRADES,
        Framework,
        Head,
        Method,
        NoHead,
        SNet,
        Standard,
    )
    from demur.nets import FactoryNet, ResNet8, ResNet18, WideResNet
    from demur.output import Output
    from demur.recipes import OneCycle, Piecewise, Recipe, recipe
    from demur.rejectors import (
        CPR,
        GDA,
        GMM,
        KD,
        KNN,
        LID,
        Con,
        Consistency,
        Coupled,
        Energy,
        Entropy,
        GDAStar,
        ImageRejector,
        MaxLogit,
        ModelScore,
        PerClass,
        RCon,
        Rejector,
        Score,
        SoftmaxMargin,
        ViM,
    )
    from demur.report import plot as plot
    from demur.runs import Record, Records, Run
    from demur.training import train
    from demur.training.retrofitting import HeadComparison, Retrofit, retrofit
    from demur.verification import Verification, verify

_MODULES = {
    "attacks": (
        "APGD CE CW DLR FAB KL PGD AcceptedError Attack Clean PlusLogScore FalseRejection "
        "ForceRejectionEnsemble HopSkipJump UntargetedMargin MinMargin Misclassified MultiTarget "
        "Objective RayS Rejected Square WorstScore"
    ),
    "attacks.balls": "L1 L2 Linf",
    "attacks.wrappers": "ModelWithScore RejectClassModel",
    "audits": "AuditReport AutoAttack EnsembleResult RejectAutoAttack audit",
    "audits.model_loading": "load_model",
    "calibrate": "TPR Coverage Risk Uncertified certify_threshold",
    "data": "CIFAR10 CIFAR100 Digits OwnImages",
    "engine": "attack",
    "errors": "BadInput",
    "evaluate": "RecordOptions LoadedRun RejectorEvaluation compare resolve_thresholds run_attack",
    "guards": "Guard GuardResult guard",
    "methods": "ATRO CARL CCAT EBD PGDAT RR TRADES Framework Head Method NoHead SNet Standard",
    "nets": "FactoryNet ResNet18 ResNet8 WideResNet",
    "output": "Output",
    "recipes": "OneCycle Piecewise Recipe recipe",
    "rejectors": (
        "CPR GDA GMM KD KNN LID Con Consistency Coupled Energy Entropy GDAStar ImageRejector "
        "MaxLogit ModelScore PerClass Rejector Score SoftmaxMargin RCon ViM "
    ),
    "runs": "Record Records Run",
    "training": "train",
    "training.retrofitting": "HeadComparison Retrofit retrofit",
    "verification": "Verification verify",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "APGD", "ATRO", "CARL", "CCAT", "CE", "CIFAR10", "CIFAR100", "CPR", "CW", "DLR", "EBD", "FAB",
    "GDA", "GMM", "KD", "KL", "KNN", "L1", "L2", "LID", "PGD", "PGDAT", "RR", "TPR", "TRADES",
    "AcceptedError", "Attack", "AuditReport", "AutoAttack", "BadInput", "Clean", "Con",
    "Consistency", "Coupled", "Coverage", "Digits", "Energy", "EnsembleResult", "Entropy",
    "FactoryNet", "FalseRejection", "ForceRejectionEnsemble", "Framework", "GDAStar", "Guard",
    "GuardResult", "Head", "HeadComparison", "HopSkipJump", "ImageRejector", "Linf", "LoadedRun",
    "MaxLogit", "Method", "MinMargin", "Misclassified", "ModelScore", "ModelWithScore",
    "MultiTarget", "NoHead", "Objective", "OneCycle", "Output", "OwnImages", "PerClass",
    "Piecewise", "PlusLogScore", "RCon", "RayS", "Recipe", "Record", "RecordOptions", "Records",
    "RejectAutoAttack", "RejectClassModel", "Rejected", "Rejector",
    "RejectorEvaluation", "ResNet8", "ResNet18", "Retrofit", "Risk", "Run", "SNet", "Score",
    "SoftmaxMargin", "Square", "Standard", "Uncertified", "UntargetedMargin", "Verification",
    "ViM", "WideResNet", "WorstScore", "attack", "audit", "certify_threshold", "compare", "guard",
    "load_model", "recipe", "resolve_thresholds", "retrofit", "run_attack", "train", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"demur.{_MODULE_OF[name]}"), name)
    if name == "plot":
        return import_module("demur.report.plot")
    raise AttributeError(f"module 'demur' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
