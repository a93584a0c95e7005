"""One-shot mixed precision: one network trained at all widths at once, from which any budget is served.

Source: C. Tang et al., "Retraining-free Model Quantization via One-Shot Weight-Coupling Learning" (CVPR
2024, arXiv 2401.01543). What is followed is the abstract and the authors' code; details that the code has and
the abstract has not are marked [code] where they stand. Left out of it: weights that begin from a trained
network, the moving average of weights, and the loss on rounding errors that the code adds in its last 110 of
150 epochs.
"""
