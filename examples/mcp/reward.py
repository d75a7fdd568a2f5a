"""The reward of the example: is the answer the digit?"""


def exact(completion: str, ground_truth: str, **columns: object) -> float:
    """1 for the right digit and nothing else, else 0."""
    return float(completion.strip() == ground_truth)
