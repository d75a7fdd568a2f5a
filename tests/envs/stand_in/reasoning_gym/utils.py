SYSTEM_PROMPTS = {"default": "Answer between <answer> and </answer>.\n", "simple": "Answer."}
