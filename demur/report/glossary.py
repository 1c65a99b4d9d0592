"""Explanations of the rejectors on the report page, for a reader who has not seen the paper."""

TERMS = {
    "Con": "Confidence (con): the probability of the predicted class, from 0 to 1.",
    "R-Con": "Rectified confidence: con corrected by A, the net's second output (usually their "
    "product). It is trained to predict T-Con without the true label.",
    "Con (trained)": "Confidence at the temperature at which it was trained to predict T-Con.",
    "SNet": "The net's second output: trained to select the images to accept.",
    "ATRO": "The net's second output: trained to trade wrong predictions against rejections.",
    "CARL": "One minus the probability of an extra class, which stands for rejection.",
    "Energy": "The log-sum-exp of the net's logits.",
    "Con+R-Con": "Two conditions in sequence: con must reach 1/2, then R-Con its threshold.",
    "T-Con": "True confidence: the probability of the true class. It needs the label, so it cannot "
    "be used in practice; it is an oracle that shows what is possible.",
    "A": "The net's second output alone, from 0 to 1: how reliable con is.",
    "Margin": "The probability of the predicted class minus that of the second best.",
    "Entropy": "The negative entropy of the predicted probabilities: how concentrated they are.",
    "MaxLogit": "The largest logit of the net.",
    "KD": "Kernel density of correctly classified features of the same class around the image.",
    "LID": "Local intrinsic dimension: how the nearest correctly classified features are spread.",
    "kNN": "The closeness of the k-th nearest correctly classified feature.",
    "GDA": "The closeness to the nearest class mean, with one covariance for all classes.",
    "GDA*": "The same, with a covariance for each class.",
    "GMM": "The same, for the predicted class only.",
    "ViM": "Energy, minus the part of the feature that no class explains.",
}
