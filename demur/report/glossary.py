"""What the names on a page mean, for a reader who has not seen the paper."""

WORDS = {
    "Con": "Confidence (con): the probability the net gives to its own answer, from 0 to 1.",
    "R-Con": "Rectified confidence: con corrected by A, the net's second output (as a rule their "
    "product). It has learned to guess T-Con without knowing the true label.",
    "Con (trained)": "Confidence at the temperature at which it was trained to guess T-Con.",
    "SNet": "The net's second output: a gate that learned which images to answer.",
    "ATRO": "The net's second output: learned to weigh a wrong answer against a refusal.",
    "CARL": "One less the probability of a further class, which means: don't know.",
    "Energy": "How strongly the net reacts to the image at all (log-sum-exp of its outputs).",
    "Con+R-Con": "Two conditions in sequence: con must reach 1/2, then R-Con its threshold.",
    "T-Con": "True confidence: the probability the net gives to the true label. It needs that "
    "label, so nobody can use it; it is an oracle that shows what is possible.",
    "A": "The net's second output alone: how far it trusts its own confidence, from 0 to 1.",
    "Margin": "The probability of the predicted class minus that of the second best.",
    "Entropy": "How concentrated the net's probabilities are, over all classes.",
    "MaxLogit": "The largest raw output of the net, before it becomes a probability.",
    "KD": "How densely right answers of the same class lie around the image, inside the net.",
    "LID": "Whether the nearest right answers lie around the image as they do around each other.",
    "kNN": "How near the k-th nearest right answer lies.",
    "GDA": "How near the image lies to the middle of a class, all classes shaped alike.",
    "GDA*": "The same, each class with a shape of its own.",
    "GMM": "The same, for the class that was answered.",
    "ViM": "Energy, less how much of the image's inner picture no class explains.",
}
