"""The reward: a function of the answer and of the row it belongs to. Replace it by your own."""

import re


def last_number_is_right(completion: str, ground_truth: str, **columns: object) -> float:
    """1 if the last number in the answer is the sum, as in `3 + 4 = 7`, 0 otherwise.

    `completion` is the answer as text, `ground_truth` the one of the row; the row's other columns come by name.
    """
    return float(re.findall(r"\d+", completion)[-1:] == [ground_truth])
