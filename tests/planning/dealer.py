"""Somebody who deals a training batch out by hand, row by row, and looks whether every rank got the same.

Imports nothing from the package: it is the other opinion on what the arithmetic there says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

Rows = list[int]


@dataclass(frozen=True)
class Player:
    """A model and its ranks."""

    nodes: int
    gpus: int
    together: tuple[int, ...] = (1,)
    """Ranks side by side, in so many directions, that compute on the same rows."""

    mini: int | None = None
    """Prompts in one optimizer step; None: the model only scores."""


@dataclass(frozen=True)
class Game:
    """A batch of prompts, and all who have work with it."""

    prompts: int
    samples: int
    micro: int
    passes: int
    players: tuple[Player, ...]


def fair(game: Game) -> bool:
    """Did every rank get the same number of rows in every micro-batch of every mini-batch of every pass, and in
    scoring, and was no row lost or dealt twice?
    """
    return all(scores(game, player) and trains(game, player) for player in game.players)


def scores(game: Game, player: Player) -> bool:
    """Deal the whole batch to the ranks."""
    rows = list(range(game.prompts * game.samples))
    hands = deal(rows, player)
    return hands is not None and all_the_same([len(hand) for hand in hands]) and dealt_once(rows, hands, player)


def trains(game: Game, player: Player) -> bool:
    """In every pass, take mini-batches of prompts off the pile until it is empty, and deal each."""
    if player.mini is None:
        return True
    for _ in range(game.passes):
        pile = list(range(game.prompts))
        while pile:
            prompts, pile = pile[: player.mini], pile[player.mini :]
            if len(prompts) != player.mini:
                return False  # the last optimizer step would be a small one
            rows = [prompt * game.samples + sample for prompt in prompts for sample in range(game.samples)]
            hands = deal(rows, player)
            if hands is None or not dealt_once(rows, hands, player):
                return False
            sizes = [[len(micro_batch) for micro_batch in cut(hand, game.micro)] for hand in hands]
            if not all_the_same(sizes) or set(sizes[0]) != {game.micro}:
                return False
    return True


def deal(rows: Rows, player: Player) -> list[Rows] | None:
    """The hand of every rank. Ranks that compute on the same rows sit at one place of the table and see the same cards.

    None where the last place does not fill up.
    """
    placements = 1
    for direction in player.together:
        placements *= direction
    table: list[list[int]] = []
    for rank in range(player.nodes * player.gpus):
        if not table or len(table[-1]) == placements:
            table.append([])
        table[-1].append(rank)
    if len(table[-1]) != placements:
        return None
    cards: list[Rows] = [[] for _ in table]
    for turn, row in enumerate(rows):
        cards[turn % len(table)].append(row)
    return [cards[index] for index, ranks in enumerate(table) for _ in ranks]


def dealt_once(rows: Rows, hands: list[Rows], player: Player) -> bool:
    """Is every row at one place, which is as many hands as sit there?"""
    placements = 1
    for direction in player.together:
        placements *= direction
    seen = Counter(row for hand in hands for row in hand)
    return seen.keys() == set(rows) and set(seen.values()) == {placements}


def cut(hand: Rows, size: int) -> list[Rows]:
    """Micro-batches of a hand; the last one has what is left."""
    return [hand[start : start + size] for start in range(0, len(hand), size)]


def all_the_same(values: list[int] | list[list[int]]) -> bool:
    """Is each like the first?"""
    return all(thing == values[0] for thing in values)
