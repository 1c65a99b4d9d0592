"""The public names of demur; `__init__.py` imports each from its module on first use."""

from demur.attacks import (
    APGD as APGD,
    CE as CE,
    CW as CW,
    DLR as DLR,
    FAB as FAB,
    KL as KL,
    PGD as PGD,
    AcceptedError as AcceptedError,
    Attack as Attack,
    Clean as Clean,
    FalseRejection as FalseRejection,
    ForceRejectionEnsemble as ForceRejectionEnsemble,
    HopSkipJump as HopSkipJump,
    MinMargin as MinMargin,
    Misclassified as Misclassified,
    MultiTarget as MultiTarget,
    Objective as Objective,
    PlusLogScore as PlusLogScore,
    RayS as RayS,
    Rejected as Rejected,
    Square as Square,
    UntargetedMargin as UntargetedMargin,
    WorstScore as WorstScore,
)
from demur.attacks.balls import L1 as L1, L2 as L2, Linf as Linf
from demur.attacks.wrappers import (
    ModelWithScore as ModelWithScore,
    RejectClassModel as RejectClassModel,
)
from demur.audits import (
    AuditReport as AuditReport,
    AutoAttack as AutoAttack,
    EnsembleResult as EnsembleResult,
    RejectAutoAttack as RejectAutoAttack,
    audit as audit,
)
from demur.audits.model_loading import load_model as load_model
from demur.calibrate import (
    TPR as TPR,
    Coverage as Coverage,
    Risk as Risk,
    Uncertified as Uncertified,
    certify_threshold as certify_threshold,
)
from demur.data import (
    CIFAR10 as CIFAR10,
    CIFAR100 as CIFAR100,
    Digits as Digits,
    OwnImages as OwnImages,
)
from demur.engine import attack as attack
from demur.errors import BadInput as BadInput
from demur.evaluate import (
    LoadedRun as LoadedRun,
    RecordOptions as RecordOptions,
    RejectorEvaluation as RejectorEvaluation,
    compare as compare,
    resolve_thresholds as resolve_thresholds,
    run_attack as run_attack,
)
from demur.guards import Guard as Guard, GuardResult as GuardResult, guard as guard
from demur.methods import (
    ATRO as ATRO,
    CARL as CARL,
    CCAT as CCAT,
    EBD as EBD,
    PGDAT as PGDAT,
    RR as RR,
    TRADES as TRADES,
    Framework as Framework,
    Head as Head,
    Method as Method,
    NoHead as NoHead,
    SNet as SNet,
    Standard as Standard,
)
from demur.nets import (
    FactoryNet as FactoryNet,
    ResNet8 as ResNet8,
    ResNet18 as ResNet18,
    WideResNet as WideResNet,
)
from demur.output import Output as Output
from demur.recipes import (
    OneCycle as OneCycle,
    Piecewise as Piecewise,
    Recipe as Recipe,
    recipe as recipe,
)
from demur.rejectors import (
    CPR as CPR,
    GDA as GDA,
    GMM as GMM,
    KD as KD,
    KNN as KNN,
    LID as LID,
    Con as Con,
    Consistency as Consistency,
    Coupled as Coupled,
    Energy as Energy,
    Entropy as Entropy,
    GDAStar as GDAStar,
    ImageRejector as ImageRejector,
    MaxLogit as MaxLogit,
    ModelScore as ModelScore,
    PerClass as PerClass,
    RCon as RCon,
    Rejector as Rejector,
    Score as Score,
    SoftmaxMargin as SoftmaxMargin,
    ViM as ViM,
)
from demur.report import plot as plot
from demur.runs import Record as Record, Records as Records, Run as Run
from demur.training import train as train
from demur.training.retrofitting import (
    HeadComparison as HeadComparison,
    Retrofit as Retrofit,
    retrofit as retrofit,
)
from demur.verification import Verification as Verification, verify as verify

__all__: list[str]
__version__: str
