def in_ascii(completion, ground_truth, **others):
    return float(bool(completion) and completion.isascii())
