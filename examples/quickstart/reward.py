"""The reward of the quick start: a function of the answer and of the row it belongs to."""


def sorted_exactly(completion: str, ground_truth: str, **_: object) -> float:
    """1.0 when the answer is the sorted word and nothing else, 0.0 otherwise.

    `completion` is the decoded answer without special tokens. The other columns of the row arrive as keyword
    arguments; this reward needs none of them.
    """
    return 1.0 if completion.strip() == ground_truth else 0.0
