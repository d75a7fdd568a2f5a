"""The reward: a function of the answer and of the row it belongs to. Replace it by your own."""


def right_sum(completion: str, ground_truth: str, **columns: object) -> float:
    """1 for the right number and nothing else, 0 otherwise.

    `completion` is the answer as text, `ground_truth` the one of the row; the row's other columns come by name.
    """
    return float(completion.strip() == ground_truth)
