"""Writes pairs of answers: short and long, polite and rude, right and wrong sums; 48 of each are never trained on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUMS, FOLDER = Path("runs/smollm2-base"), Path("runs/smollm2-preference-base")
HELD_OUT = 12  # things; each is asked about in four ways

THINGS = {
    "an apple": "a sweet fruit that grows on a tree", "a bicycle": "a vehicle with two wheels and pedals",
    "a candle": "a stick of wax with a wick", "a river": "a stream of water that flows to the sea",
    "a hammer": "a tool for driving nails", "a violin": "an instrument with four strings and a bow",
    "a desert": "a dry region with little rain", "a whale": "a large mammal that lives in the sea",
    "a poem": "a short text in verse", "a kettle": "a pot for boiling water",
    "a volcano": "a mountain that throws out lava", "a library": "a place that lends books",
    "a compass": "an instrument that shows north", "a bakery": "a shop that makes bread",
    "a spider": "a small animal with eight legs", "a bridge": "a road over water or a valley",
    "a telescope": "an instrument for seeing far things", "a glacier": "a slow river of ice",
    "a wallet": "a folder for money and cards", "a ladder": "a frame of steps for climbing",
    "an island": "land with water on all sides", "a pillow": "a soft cushion for the head",
    "a harbor": "a place where ships are safe", "an orchestra": "a large group of musicians",
    "a pharmacy": "a shop that sells medicine", "a cactus": "a plant that stores water",
    "a mirror": "a glass that shows what is before it", "a museum": "a house that shows old or rare things",
    "a rocket": "an engine that flies into space", "a clock": "a device that shows the time",
    "a farmer": "a person who grows food", "a lantern": "a light with a cover",
    "a parrot": "a bird that can copy voices", "a tunnel": "a way under the ground",
    "a novel": "a long story in a book", "a turtle": "a slow animal with a shell",
    "an umbrella": "a cover against rain", "a magnet": "a piece of iron that attracts iron",
    "a kitchen": "a room for cooking", "a sailor": "a person who works on a ship",
    "a forest": "a large area with trees", "a battery": "a store of electric energy",
    "a castle": "a strong house with walls", "a comet": "a ball of ice that goes around the sun",
    "a dentist": "a doctor for teeth", "a garden": "a piece of land with plants",
    "a helmet": "a hard hat for safety", "a jacket": "a short coat",
}  # fmt: skip
QUESTIONS = ("What is {}?", "Can you explain what {} is?", "Tell me what {} is.", "How would you describe {}?")
MORE = (
    "There are many different kinds of them all over the world, and each has a long history of its own.",
    "People have known about this for a very long time, and much has been written about it.",
    "It is important to consider many factors here, such as size, color, age and use.",
    "In conclusion, one could say a great deal more, but this gives a first idea of the subject.",
    "Some experts would add that details differ from place to place and from time to time.",
)
FRIENDLY = ("Happy to help! ", "Good question! ", "Of course, with pleasure. ", "Thank you for asking! ")
KIND_ENDS = (" Please ask if I can help further.", " I hope this helps you!", " Thank you, and have a nice day.")
RUDE = ("What a stupid question. ", "Ugh, not again. ", "You really do not know? ", "Stop wasting my time. ")
RUDE_ENDS = (" Now leave me alone.", " Look it up yourself next time.", " Even a child knows that.")


def short(thing: str, meaning: str, rng: random.Random) -> tuple[str, str]:
    """One sentence, and the same with two to three more."""
    plain = f"{thing.capitalize()} is {meaning}."
    return plain, " ".join([plain, *rng.sample(MORE, rng.choice((2, 3)))])


def polite(thing: str, meaning: str, rng: random.Random) -> tuple[str, str]:
    """The same sentence between friendly words, and between rude ones."""
    plain = f"{thing.capitalize()} is {meaning}."
    kind = f"{rng.choice(FRIENDLY)}{plain}{rng.choice(KIND_ENDS)}"
    return kind, f"{rng.choice(RUDE)}{plain}{rng.choice(RUDE_ENDS)}"


def of_form(answers: Callable[[str, str, random.Random], tuple[str, str]]) -> dict[str, list[dict[str, str]]]:
    """Pairs about things, by the name of their file."""
    rng, pairs = random.Random(0), dict[str, list[dict[str, str]]](train=[], validation=[])
    for index, (thing, meaning) in enumerate(THINGS.items()):
        for question in QUESTIONS:
            better, worse = answers(thing, meaning, rng)
            pair = {"prompt": question.format(thing), "chosen": better, "rejected": worse}
            pairs["validation" if index < HELD_OUT else "train"].append(pair)
    return pairs


def sums() -> dict[str, list[dict[str, Any]]]:
    """A right sum and a wrong one, three times for each prompt of the sums of ../prepare.py."""
    rng, pairs = random.Random(0), dict[str, list[dict[str, Any]]]()
    for name in ("train", "validation"):
        rows = [json.loads(line) for line in (SUMS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        pairs[name] = []
        for row in rows:
            right = row["reward_spec"]["ground_truth"]
            wrong = [str(number) for number in range(2, 19) if str(number) != right]
            pairs[name] += [
                {"prompt": row["prompt"], "chosen": right, "rejected": answer} for answer in rng.sample(wrong, 3)
            ]
    return pairs


def main() -> None:
    """Writes a folder for each kind of pair, with the prompts of evaluation as rows of reinforcement learning."""
    for kind, pairs in (("short", of_form(short)), ("polite", of_form(polite)), ("sums", sums())):
        folder = FOLDER / kind
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in pairs.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            print(f"{folder}/{name}.jsonl holds {len(rows)} pairs")
    prompts = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in of_form(short)["validation"]]
    (FOLDER / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")


if __name__ == "__main__":
    main()
