"""Attack objectives: what an attack maximises, one value per image.

CE()                                          # cross-entropy of the true label
PlusLogScore(RCon(), eta=10)                       # CE + 10 log R-Con: wrong and accepted
UntargetedMargin() + 0.5 * PlusLogScore(Energy())       # objectives add and scale
"""
